"""One tiny engine for the tests of this folder, and one as plain as can be: rows alone, one step
a launch, no fused commit, no overlap, no prefix cache."""

import pytest
from support.tiny_engine import BLOCK, LLADA22, make_engine

from jdllm.runner.block import proposal


@pytest.fixture(scope="session")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        # Batches of two rows and more gather the positions that can still change.
        patch.setattr(proposal, "ROWS_OF_A_PASS", BLOCK)
        engine = make_engine(with_logits=True)
    with engine:
        yield engine


PLAIN = {
    "disable_radix_cache": True,
    "max_running_requests": 1,
    "num_continuous_decode_steps": 1,
    "disable_fused_commit": True,
    "disable_overlap_schedule": True,
}


@pytest.fixture(scope="session")
def plain_engine():
    with make_engine(with_logits=True, **PLAIN) as engine:
        yield engine


# The models whose own rules the laws must hold for, with what their engines need.
@pytest.fixture(scope="session", params=["llada2", "llada22"])
def model(request):
    return {"llada2": {}, "llada22": LLADA22}[request.param]


@pytest.fixture(scope="session")
def engine_of(model, request):
    """The engine of `model`, which packs as much into a launch as it can."""
    if not model:
        yield request.getfixturevalue("engine")
        return
    with make_engine(with_logits=True, **model) as engine:
        yield engine


@pytest.fixture(scope="session")
def plain_engine_of(model, request):
    """The engine of `model` that is as plain as can be."""
    if not model:
        yield request.getfixturevalue("plain_engine")
        return
    with make_engine(with_logits=True, **model | PLAIN) as engine:
        yield engine
