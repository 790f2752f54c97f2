"""The canvas algorithms with real logits against stored runs of the published samplers.

Every forward here is a full one; the cached runs belong to the engine, which has the pages. All
tokens and all numbers of forwards are equal: no marked defect of a reference shows in these runs
(no end token occurs, no length leaves a tail, no prompt holds the mask).
"""

import functools
import json
import pathlib

import numpy as np
import pytest
from support import canvas_rows

from jdllm.runner import full_forward

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"
MASK_ID = 240
LLADA = {"steps": 16, "block_length": 8}
MULTI_BLOCK = {"block_length": 8, "early_stop": False, "cache_mode": "exact"}
# (family, run, algorithm, options, new tokens, forwards); the settings are those of the runs'
# meta.json and d3llm.json, or of these folders' description where the file lacks them.
RUNS = {
    "llada-16-steps": ("llada", "gen0", "LLaDA", LLADA, 32, 16),
    "llada-one-block": ("llada", "gen1", "LLaDA", {"steps": 32, "block_length": 32}, 32, 32),
    "llada-three-a-step": ("llada", "gen2", "LLaDA", {"steps": 8, "block_length": 12}, 24, 8),
    "fast-dllm": ("llada", "gen3", "FastDLLM", {"threshold": 0.6, "block_length": 8}, 32, 17),
    # d3LLM's `generate`: the lowest entropy of the current block, and all up to the threshold.
    "d3llm-blocks": (
        "llada", "d3llm0", "EntropyThreshold", {"threshold": 0.5, "block_length": 8}, 32, 28,
    ),
    "d3llm-multi-block": (
        "llada", "d3llm1", "FullAttnMultiBlock",
        MULTI_BLOCK | {"threshold": 0.45, "block_add_threshold": 0.1,
                       "decoded_token_threshold": 0.95}, 32, 10,
    ),
    "d3llm-eager": (
        "llada", "d3llm2", "FullAttnMultiBlock",
        MULTI_BLOCK | {"threshold": 1.5, "block_add_threshold": 0.25,
                       "decoded_token_threshold": 0.5}, 32, 7,
    ),
    "dream-entropy": ("dream", "gen0", "Dream", {"steps": 16, "alg": "entropy"}, 24, 16),
    "dream-maskgit": ("dream", "gen1", "Dream", {"steps": 8, "alg": "maskgit_plus"}, 24, 8),
    "dream-margin": ("dream", "gen2", "Dream", {"steps": 24, "alg": "topk_margin"}, 24, 24),
}  # fmt: skip


@functools.cache
def model(family):
    return full_forward.load_model(GOLDENS / family, dtype="float32")


def statistics(logits):
    """Returns the proposal's fields of logits [S, V], in float64."""
    z = logits.astype(np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)
    allowed = p.copy()
    allowed[:, MASK_ID] = -1  # never proposed, but in the normaliser
    two = np.sort(allowed, axis=1)[:, -2:]
    return {
        "tokens": allowed.argmax(axis=1),
        "prob": two[:, 1],
        "entropy": entropy,
        "margin": two[:, 1] - two[:, 0],
    }


def generated(family, algorithm, options, prompt, new_tokens):
    """Returns (text, number of forwards) of one row."""
    row = canvas_rows.Row(
        text=[*prompt, *[None] * new_tokens],
        start=len(prompt),
        end=len(prompt) + new_tokens,
        options=options,
    )
    is_shifted = family == "dream"

    def propose(forward, canvas):
        ids = np.where(canvas.masked, MASK_ID, canvas.tokens)
        logits = np.asarray(model(family).logits(ids))[0]
        if is_shifted:
            logits = np.concatenate([logits[:1], logits[:-1]])
        return {name: values[None] for name, values in statistics(logits).items()}

    last, nfe, tokens = canvas_rows.run(
        algorithm, [row], row.length, propose, is_shifted=is_shifted
    )
    assert tokens[0] == nfe[0] * row.length, "every forward is full"
    return last.tokens[0].tolist(), int(nfe[0])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_reference_is_repeated(name):
    family, run, algorithm, options, new_tokens, nfe = RUNS[name]
    prompt = np.load(GOLDENS / family / "prompt.npy")[0].tolist()
    expected = np.load(GOLDENS / family / f"{run}_output.npy")[0].tolist()
    assert len(expected) == len(prompt) + new_tokens
    assert generated(family, algorithm, options, prompt, new_tokens) == (expected, nfe)


def test_a_literal_mask_in_the_prompt_is_text():
    family, _, algorithm, options, new_tokens, _ = RUNS["d3llm-multi-block"]
    prompt = np.load(GOLDENS / family / "prompt.npy")[0].tolist()
    prompt[3] = prompt[-1] = MASK_ID
    text, _ = generated(family, algorithm, options, prompt, new_tokens)
    assert text[: len(prompt)] == prompt
    assert not {MASK_ID, canvas_rows.MASK}.intersection(text[len(prompt) :])


def test_the_runs_are_those_of_the_stored_settings():
    llada = json.loads((GOLDENS / "llada" / "meta.json").read_text())["generate"]
    dream = json.loads((GOLDENS / "dream" / "meta.json").read_text())["generate"]
    d3llm = json.loads((GOLDENS / "llada" / "d3llm.json").read_text())
    stored = {f"gen{i}": run for i, run in enumerate(llada)}
    stored |= {f"d3llm{i}": run for i, run in enumerate(d3llm)}
    stored_dream = {f"gen{i}": run for i, run in enumerate(dream)}
    for family, run, _, options, new_tokens, nfe in RUNS.values():
        settings = (stored if family == "llada" else stored_dream)[run]
        options = options | {"block_size": options.get("block_length")}
        for key, value in settings.items():
            if key in options and not (key == "steps" and "threshold" in settings):
                assert options[key] == value, (run, key)
        assert settings.get("nfe", settings.get("steps", nfe)) == nfe
        lengths = {settings.get(key) for key in ("gen_length", "max_new_tokens")}
        assert new_tokens in lengths
