"""SDAR's and Stable-DiffCoder's rules on tiny reference checkpoints: ids and forward counts, exact.

The references count the prefill (SDAR) and, for every block, a
forward that writes its K,V. Ours counts decode forwards: the last block needs no
such forward, and with fused commits no block does.
"""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
from support.tiny_engine import make_engine

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"


@dataclasses.dataclass(frozen=True)
class Run:
    """A stored generation: its block size, options, prompt, output and forwards."""

    family: str
    number: int
    meta: dict

    @property
    def block(self):
        return self.meta["block_length"]

    @property
    def prompt(self):
        own = GOLDENS / self.family / f"gen{self.number}_prompt.npy"
        return np.load(own if own.exists() else GOLDENS / self.family / "prompt.npy")[0].tolist()

    @property
    def output(self):
        """The generated ids alone."""
        ids = np.load(GOLDENS / self.family / f"gen{self.number}_output.npy").reshape(-1)
        return ids[len(self.prompt) :].tolist()

    @property
    def dllm(self):
        if self.family == "sdar":
            options = {"algorithm": "SDAR", "remasking_strategy": self.meta["remasking_strategy"]}
            options["denoising_steps"] = self.meta["denoising_steps"]
            threshold = self.meta.get("confidence_threshold")
            return options | ({} if threshold is None else {"threshold": threshold})
        options = {"algorithm": "MaskedDiffusion"}
        if self.meta["threshold"] is not None:
            return options | {"threshold": self.meta["threshold"]}
        blocks = self.meta["gen_length"] // self.block
        steps = self.meta["steps"] // blocks
        return options | {"selection_policy": "low_confidence", "max_denoising_steps": steps}

    @property
    def stop_token_ids(self):
        return [self.meta["eos"]] if "eos" in self.meta else []

    @property
    def expected(self):
        """The ids that both must give: the reference's up to its end token, if it meets one.

        Where prompt and output end inside a block, the reference cuts its last block short, so that
        its positions see fewer masks. Ours denoises a whole block, and then cuts.
        """
        for end in self.stop_token_ids:
            if end in self.output:
                return self.output[: self.output.index(end) + 1]
        whole = (len(self.prompt) + len(self.output)) // self.block * self.block
        return self.output[: whole - len(self.prompt)]

    @property
    def is_cut(self):
        return self.expected != self.output and not self.stop_token_ids


def runs_of(family, key):
    stored = json.loads((GOLDENS / family / "meta.json").read_text())[key]
    return [Run(family, i, meta) for i, meta in enumerate(stored)]


RUNS = [*runs_of("sdar", "generate"), *runs_of("stable_diffcoder", "runs")]


@functools.cache
def results(family, block, is_fused):
    """Returns what each run of a family with that block size gives."""
    mine = [run for run in RUNS if (run.family, run.block) == (family, block)]
    with make_engine(
        model_path=str(GOLDENS / family),
        dllm_algorithm=mine[0].dllm["algorithm"],
        dllm_algorithm_config={"block_size": block},
        max_running_requests=1,
        context_length=96,
        chunked_prefill_size=16,
        page_size=8,
        num_continuous_decode_steps=8 if is_fused else 1,
        disable_fused_commit=not is_fused,
    ) as engine:
        found = engine.generate(
            input_ids=[run.prompt for run in mine],
            sampling_params=[
                {
                    "max_new_tokens": len(run.output),
                    "dllm": run.dllm,
                    "stop_token_ids": run.stop_token_ids,
                }
                for run in mine
            ],
        )
    return {run.number: result for run, result in zip(mine, found, strict=True)}


@pytest.mark.parametrize(
    "is_fused", [True, pytest.param(False, marks=pytest.mark.campaign)], ids=["fused", "plain"]
)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.family}-gen{run.number}")
def test_generation_equals_the_reference_token_for_token(run, is_fused):
    result = results(run.family, run.block, is_fused)[run.number]
    assert result["output_ids"][: len(run.expected)] == run.expected
    if run.is_cut:
        assert len(result["output_ids"]) == len(run.output)
        return
    assert result["output_ids"] == run.expected
    info = result["meta_info"]
    blocks = info["dllm"]["blocks"]
    assert blocks == -(-(len(run.prompt) % run.block + len(run.expected)) // run.block)
    prefills = 1 if run.family == "sdar" else 0
    denoising = run.meta["nfe"] - prefills - blocks
    assert info["nfe"] == denoising + (0 if is_fused else blocks - 1)
