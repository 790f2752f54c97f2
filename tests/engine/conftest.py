"""One tiny engine for the tests of this folder, and one as plain as can be: rows alone, one step
a launch, no fused commit, no overlap, no prefix cache."""

import pytest
from support.tiny_engine import BLOCK, make_engine

from jdllm.runner.block import proposal


@pytest.fixture(scope="session")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        # Batches of two rows and more gather the positions that can still change.
        patch.setattr(proposal, "ROWS_OF_A_PASS", BLOCK)
        engine = make_engine(with_logits=True)
    with engine:
        yield engine


@pytest.fixture(scope="session")
def plain_engine():
    with make_engine(
        with_logits=True,
        disable_radix_cache=True,
        max_running_requests=1,
        num_continuous_decode_steps=1,
        disable_fused_commit=True,
        disable_overlap_schedule=True,
    ) as engine:
        yield engine
