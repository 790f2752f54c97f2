"""LowConfidence on the tiny reference checkpoint: generated ids and forward counts, exact.

The reference ran PyTorch's published `generate` (see the README beside the data). Its
`nfe` counts denoising forwards; ours counts persist forwards too, one per block but
the last, which ends the request, unless the next block's first step rides along.
"""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

import jdllm

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada2"
META = json.loads((GOLDEN / "meta.json").read_text())["generate"]


WAYS = [(None, 8, True), (8, 3, True), (8, 1, False)]
RUNS = [0, 1, 3]


@functools.cache
def answers(page_size, steps, is_fused, block_size):
    """Returns (answer, answer with blocks whole) of each stored run with blocks of this size."""
    told = {}
    with (
        jax.default_matmul_precision("highest"),
        jdllm.Engine(
            model_path=str(GOLDEN),
            dtype="float32",
            skip_tokenizer_init=True,
            dllm_algorithm="LowConfidence",
            dllm_algorithm_config={"block_size": block_size},
            max_running_requests=1,
            context_length=96,
            chunked_prefill_size=16,
            page_size=page_size,
            num_continuous_decode_steps=steps,
            disable_fused_commit=not is_fused,
        ) as engine,
    ):
        for run, meta in enumerate(META):
            if run in RUNS and meta["block_length"] == block_size:
                prompt = np.load(GOLDEN / f"gen{run}_prompt.npy")[0]
                length = meta["gen_length"]
                told[run] = [
                    engine.generate(
                        input_ids=prompt,
                        sampling_params={
                            "max_new_tokens": count,
                            "dllm": {"threshold": meta["threshold"]},
                        },
                    )
                    # The reference denoises the last block whole.
                    for count in (length, length + -(len(prompt) + length) % block_size)
                ]
    return told


@pytest.mark.parametrize(
    ("way", "run"),
    [
        pytest.param(
            way,
            run,
            id="{}-{}-{}-gen{}".format(*way, run),
            # Each way and each size of blocks is an engine of its own.
            marks=[] if way == WAYS[0] and run != 3 else [pytest.mark.campaign],
        )
        for way in WAYS
        for run in RUNS
    ],
)
def test_generation_equals_the_reference_token_for_token(way, run):
    meta = META[run]
    expected = np.load(GOLDEN / f"gen{run}_output.npy").reshape(-1)
    cut, result = answers(*way, meta["block_length"])[run]
    assert cut["output_ids"] == expected.tolist()
    assert cut["meta_info"]["completion_tokens"] == meta["out_len"]
    assert cut["meta_info"]["nfe"] <= result["meta_info"]["nfe"]
    assert result["output_ids"][: len(expected)] == expected.tolist()
    info = result["meta_info"]
    _, _, is_fused = way
    persists = 0 if is_fused else info["dllm"]["blocks"] - 1
    assert info["nfe"] - persists == meta["nfe"]
    assert info["tpf"] == pytest.approx(info["completion_tokens"] / info["nfe"], abs=1e-3)


INDEL = GOLDEN.parent / "llada22"
INDEL_RUNS = json.loads((INDEL / "meta.json").read_text())["runs"]


@functools.cache
def indel_answers(steps, is_fused):
    """Returns the answers to all stored prompts of LLaDA2.2, all in one batch."""
    prompts = [np.load(INDEL / f"gen{run}_prompt.npy")[0] for run in range(len(INDEL_RUNS))]
    params = [
        {"max_new_tokens": run["gen_length"], "ignore_eos": True, "dllm": run["config"]}
        for run in INDEL_RUNS
    ]
    with (
        jax.default_matmul_precision("highest"),
        jdllm.Engine(
            model_path=str(INDEL),
            dtype="float32",
            skip_tokenizer_init=True,
            max_running_requests=4,
            context_length=96,
            max_total_tokens=4 * 96,
            chunked_prefill_size=16,
            page_size=8,
            num_continuous_decode_steps=steps,
            disable_fused_commit=not is_fused,
        ) as engine,
    ):
        return engine.generate(input_ids=prompts, sampling_params=params)


@pytest.mark.campaign
@pytest.mark.parametrize("run", range(len(INDEL_RUNS)))
@pytest.mark.parametrize(("steps", "is_fused"), [(8, False), (8, True)])
def test_insertion_and_deletion_equal_the_reference_token_for_token(steps, is_fused, run):
    meta, result = INDEL_RUNS[run], indel_answers(steps, is_fused)[run]
    prompt = np.load(INDEL / f"gen{run}_prompt.npy").reshape(-1)
    expected = np.load(INDEL / f"gen{run}_output.npy").reshape(-1)[len(prompt) :]
    assert result["output_ids"] == expected.tolist()
    # The last forward of a request, which only persists its last block, is not needed. A fused
    # commit saves that of other blocks too, if their row gets a place in the step.
    saved = meta["nfe"] - result["meta_info"]["nfe"]
    assert meta["nfe"] == sum(meta["steps_per_block"])
    assert 1 <= saved <= (len(meta["steps_per_block"]) if is_fused else 1)
    assert result["meta_info"]["dllm"]["algorithm"] == "JointThresholdInDel"
