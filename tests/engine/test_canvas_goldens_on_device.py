"""Full-canvas serving against stored runs of the published samplers: ids and forwards, exact.

`tests/decoding/test_canvas_goldens.py` does the same without an engine, for the runs without a
cache. The references' own counts are stored beside the runs, but where a marked defect adds
forwards: the inner loop of Fast-dLLM's caches runs on blocks that the first forward finished.
"""

import numpy as np
import pytest
from support import canvas_engine
from support.canvas_asks import Ask
from support.canvas_engine import GOLDENS
from support.tiny_engine import assert_nothing_held

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

FAST = {"algorithm": "FastDLLM", "threshold": 0.6, "block_length": 8}
FAST_STEPS = {"algorithm": "FastDLLM", "steps": 16, "block_length": 16}
SURE = {
    "algorithm": "FullAttnMultiBlock", "block_length": 8, "threshold": 0.45,
    "block_add_threshold": 0.1, "decoded_token_threshold": 0.95,
}  # fmt: skip
EAGER = SURE | {"threshold": 1.5, "block_add_threshold": 0.25, "decoded_token_threshold": 0.5}
# (family, run) -> (options, new tokens, forwards)
RUNS = {
    ("llada", "gen0"): ({"algorithm": "LLaDA", "steps": 16, "block_length": 8}, 32, 16),
    ("llada", "gen1"): ({"algorithm": "LLaDA", "steps": 32, "block_length": 32}, 32, 32),
    ("llada", "gen2"): ({"algorithm": "LLaDA", "steps": 8, "block_length": 12}, 24, 8),
    ("llada", "gen3"): (FAST | {"cache_mode": "none"}, 32, 17),
    ("llada", "gen4"): (FAST | {"cache_mode": "prefix"}, 32, 17),
    ("llada", "gen5"): (FAST | {"cache_mode": "dual"}, 32, 17),
    ("llada", "gen6"): (FAST_STEPS | {"cache_mode": "prefix"}, 32, 16),
    ("llada", "gen7"): (FAST_STEPS | {"cache_mode": "dual"}, 32, 16),
    ("llada", "d3llm0"): (
        {"algorithm": "EntropyThreshold", "threshold": 0.5, "block_length": 8}, 32, 28,
    ),
    ("llada", "d3llm1"): (SURE, 32, 10),
    ("llada", "d3llm2"): (EAGER, 32, 7),
    ("llada", "d3llm3"): (
        SURE | {"cache_mode": "delayed", "cache_delay_iter": 1, "refresh_interval": 10000}, 32, 12,
    ),
    ("llada", "d3llm4"): (
        EAGER | {"cache_mode": "delayed", "cache_delay_iter": 2, "refresh_interval": 6}, 32, 15,
    ),
    ("dream", "gen0"): ({"algorithm": "Dream", "steps": 16, "alg": "entropy"}, 24, 16),
    ("dream", "gen1"): ({"algorithm": "Dream", "steps": 8, "alg": "maskgit_plus"}, 24, 8),
    ("dream", "gen2"): ({"algorithm": "Dream", "steps": 24, "alg": "topk_margin"}, 24, 24),
}  # fmt: skip


def ask_of(family, run):
    dllm, wanted, _ = RUNS[family, run]
    return Ask(prompt=canvas_engine.prompt(family), wanted=wanted, dllm=dllm)


def check(result, family, run):
    stored = np.load(GOLDENS / family / f"{run}_output.npy")[0].tolist()
    _, wanted, nfe = RUNS[family, run]
    assert canvas_engine.prompt(family) + result["output_ids"] == stored, run
    info = result["meta_info"]
    assert info["nfe"] == nfe, run
    assert info["completion_tokens"] == wanted
    assert info["tpf"] == pytest.approx(wanted / nfe, abs=1e-3)
    assert max(info["step_map"]) == nfe


@pytest.mark.parametrize(("family", "run"), RUNS, ids=["-".join(key) for key in RUNS])
def test_a_run_of_the_reference_is_repeated(family, run):
    engine = canvas_engine.shared(family)
    check(canvas_engine.generate(engine, [ask_of(family, run)])[0], family, run)


@pytest.mark.parametrize("family", canvas_engine.ALGORITHMS)
def test_all_runs_of_a_family_share_a_batch(family):
    engine = canvas_engine.shared(family)
    runs = [run for name, run in RUNS if name == family]
    results = canvas_engine.generate(engine, [ask_of(family, run) for run in runs])
    for run, result in zip(runs, results, strict=True):
        check(result, family, run)
    assert_nothing_held(engine)


@pytest.mark.parametrize("family", canvas_engine.ALGORITHMS)
def test_the_oracles_forward_is_the_references(family):
    model = canvas_engine.model(family)
    ids = np.load(GOLDENS / family / "inputs.npy")
    stored = np.load(GOLDENS / family / "logits.npy")
    for row, logits in zip(ids, stored, strict=True):
        hidden = model.window(row, 0, len(row), model.empty_cache(len(row)))
        np.testing.assert_allclose(model.logits(hidden), logits, atol=canvas_engine.ATOL)


@pytest.mark.parametrize("run", ["gen4", "gen5", "d3llm3", "d3llm4"])
def test_the_oracle_repeats_cached_runs_too(run):
    found = canvas_engine.decoded("llada", ask_of("llada", run))
    stored = np.load(GOLDENS / "llada" / f"{run}_output.npy")[0].tolist()
    assert canvas_engine.prompt("llada") + found.output_ids == stored
    assert found.nfe == RUNS["llada", run][2]
