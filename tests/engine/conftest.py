"""One tiny engine for the tests of this folder, and one as plain as can be: rows alone, one step
a launch, no fused commit, no overlap, no prefix cache."""

import contextlib
import functools
import pathlib

import pytest
from support import canvas_engine
from support.tiny_engine import BLOCK, LLADA22, VOCAB, make_engine

from jdllm.runner.block import proposal

FOLDER = pathlib.Path(__file__).parent
OPEN = contextlib.ExitStack()  # engines of all modules here: half a gigabyte


@functools.cache
def runs_campaign(session):
    """Whether tests of this folder's campaign are run.

    Only they ask plain engines or canvases for launches with logits: by default these launches, the
    largest, are not compiled there.
    """
    here = (one for one in session.items if FOLDER in one.path.parents)
    return any(one.get_closest_marker("campaign") for one in here)


def pytest_collection_finish(session):
    canvas_engine.serves_logits = runs_campaign(session)


def is_last_here(item, nextitem):
    """Whether no test of this folder follows in this process, which may be one of several."""
    if nextitem is None:
        return True
    items = item.session.items
    return not any(FOLDER in one.path.parents for one in items[items.index(nextitem) :])


def pytest_runtest_teardown(item, nextitem):
    """Closes the engines after the last test of this folder, not at the end of the session."""
    if is_last_here(item, nextitem):
        OPEN.close()
        canvas_engine.close_shared()


@pytest.fixture(scope="session")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        # Batches of two rows and more gather the positions that can still change.
        patch.setattr(proposal, "ROWS_OF_A_PASS", BLOCK)
        engine = make_engine(with_logits=True)
    return OPEN.enter_context(engine)


PLAIN = {
    "disable_radix_cache": True,
    "max_running_requests": 1,
    "num_continuous_decode_steps": 1,
    "disable_fused_commit": True,
    "disable_overlap_schedule": True,
}


@pytest.fixture(scope="session")
def plain_engine(request):
    with_logits = runs_campaign(request.session)
    return OPEN.enter_context(make_engine(with_logits=with_logits, **PLAIN))


@pytest.fixture(scope="module")
def indel_engine(tmp_path_factory):
    """Like `engine`, of the model that moves tokens (LLaDA2.2); each token is a letter."""
    tokenizer = tmp_path_factory.mktemp("letters")
    canvas_engine.write_tokenizer(tokenizer, VOCAB)
    options = {"tokenizer_path": str(tokenizer), "skip_tokenizer_init": False}
    with make_engine(with_logits=True, **LLADA22 | options) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_indel_engine():
    with make_engine(with_logits=True, **LLADA22 | PLAIN) as engine:
        yield engine


# The models whose own rules the laws must hold for, with what their engines need.
# Engines of the second live as long as a module: two of them take a gigabyte.
@pytest.fixture(
    scope="module", params=["llada2", pytest.param("llada22", marks=pytest.mark.campaign)]
)
def model(request):
    return {"llada2": {}, "llada22": LLADA22}[request.param]


@pytest.fixture(scope="module")
def engine_of(model, request):
    """The engine of `model`, which packs as much into a launch as it can."""
    return request.getfixturevalue("indel_engine" if model else "engine")


@pytest.fixture(scope="module")
def plain_engine_of(model, request):
    """The engine of `model` that is as plain as can be."""
    return request.getfixturevalue("plain_indel_engine" if model else "plain_engine")
