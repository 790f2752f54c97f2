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


@pytest.mark.parametrize(
    ("page_size", "steps", "is_fused", "run"),
    [
        pytest.param(
            *way,
            run,
            id="{}-{}-{}-gen{}".format(*way, run),
            # Each way is an engine of its own.
            marks=[] if i == 0 else [pytest.mark.campaign],
        )
        for i, way in enumerate(WAYS)
        for j, run in enumerate(RUNS)
    ],
)
def test_generation_equals_the_reference_token_for_token(page_size, steps, is_fused, run):
    meta = META[run]
    prompt = np.load(GOLDEN / f"gen{run}_prompt.npy")[0]
    expected = np.load(GOLDEN / f"gen{run}_output.npy").reshape(-1)
    with (
        jax.default_matmul_precision("highest"),
        jdllm.Engine(
            model_path=str(GOLDEN),
            dtype="float32",
            skip_tokenizer_init=True,
            dllm_algorithm="LowConfidence",
            dllm_algorithm_config={
                "threshold": meta["threshold"],
                "block_size": meta["block_length"],
            },
            max_running_requests=1,
            context_length=96,
            chunked_prefill_size=16,
            page_size=page_size,
            num_continuous_decode_steps=steps,
            disable_fused_commit=not is_fused,
        ) as engine,
    ):
        # Up to the end of a block, which the reference denoises whole.
        wanted = meta["gen_length"] + -(len(prompt) + meta["gen_length"]) % meta["block_length"]
        result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": wanted})
        cut = engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": meta["gen_length"]}
        )
    assert cut["output_ids"] == expected.tolist()
    assert cut["meta_info"]["completion_tokens"] == meta["out_len"]
    assert cut["meta_info"]["nfe"] <= result["meta_info"]["nfe"]
    assert result["output_ids"][: len(expected)] == expected.tolist()
    info = result["meta_info"]
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
