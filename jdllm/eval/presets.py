"""Decoding settings of published evaluations, by name: `jdllm eval --preset d3llm-llada`.

A preset gives what nobody gave otherwise: an explicit option, `--model_args` or the value of a
sweep comes before it. The settings of a run, with the preset's, are in its `results.json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Denoising options and the longest answer; `by_task` has what differs for a task."""

    about: str
    dllm: Options
    max_new_tokens: int | None = None
    by_task: Mapping[str, Options] = dataclasses.field(default_factory=dict)

    def options_for(self, task: str) -> dict[str, Any]:
        """Returns the denoising options for a task of `jdllm.tasks.registry`."""
        return {**self.dllm, **self.by_task.get(task, {})}


_D3LLM = {
    "algorithm": "FullAttnMultiBlock",
    "cache_mode": "delayed",
    "block_length": 32,
    "block_add_threshold": 0.1,
    "decoded_token_threshold": 0.95,
    "refresh_interval": 3,
}
_FAST = {"algorithm": "FastDLLM", "threshold": 0.9, "block_length": 32}
_JOINT = {"algorithm": "JointThreshold"}
# Thresholds of the LLaDA2.1 report (speed and quality mode); recipes of hao-ai-lab/d3LLM's
# evaluation scripts; defaults of the samplers of SDAR, Stable-DiffCoder and NVlabs/Fast-dLLM.
PRESETS: dict[str, Preset] = {
    "llada20": Preset(
        about="LLaDA2.0",
        dllm={"algorithm": "LowConfidence", "threshold": 0.95},
    ),
    "llada21-s": Preset(
        about="LLaDA2.1, speed mode",
        dllm={**_JOINT, "threshold": 0.5, "edit_threshold": 0.0, "max_post_edit_steps": 16},
    ),
    "llada21-q": Preset(
        about="LLaDA2.1, quality mode",
        dllm={**_JOINT, "threshold": 0.7, "edit_threshold": 0.5, "max_post_edit_steps": 16},
    ),
    "sdar": Preset(
        about="SDAR, dynamic",
        dllm={
            "algorithm": "SDAR",
            "remasking_strategy": "low_confidence_dynamic",
            "threshold": 0.85,
        },
    ),
    "sdar-static": Preset(
        about="SDAR, static",
        dllm={"algorithm": "SDAR", "remasking_strategy": "low_confidence_static"},
    ),
    "stable-diffcoder": Preset(
        about="Stable-DiffCoder",
        dllm={"algorithm": "MaskedDiffusion", "threshold": 0.95},
        max_new_tokens=128,
    ),
    "fast-dllm-v2": Preset(
        about="Fast-dLLM v2",
        dllm={"algorithm": "HierarchyBlock", "threshold": 0.9, "small_block_size": 8},
    ),
    "d3llm-llada": Preset(
        about="d3LLM-LLaDA, by task",
        dllm={**_D3LLM, "threshold": 0.5, "cache_delay_iter": 2},
        max_new_tokens=256,
        by_task={
            "math500": {"cache_delay_iter": 1},
            "humaneval": {
                "block_add_threshold": 1.0,
                "decoded_token_threshold": 1.0,
                "refresh_interval": 4,
            },
            "mbpp": {"threshold": 0.4},
        },
    ),
    "d3llm-dream": Preset(
        about="d3LLM-Dream, by task",
        dllm={**_D3LLM, "threshold": 0.4, "cache_delay_iter": 2},
        max_new_tokens=256,
        by_task={"gsm8k": {"cache_delay_iter": 1}},
    ),
    "d3llm-dream-coder": Preset(
        about="d3LLM-Dream-Coder",
        dllm={**_D3LLM, "threshold": 0.5, "cache_delay_iter": 32},
        max_new_tokens=256,
    ),
    "fast-dllm": Preset(
        about="Fast-dLLM without a cache",
        dllm={**_FAST, "cache_mode": "none"},
        max_new_tokens=256,
    ),
    "fast-dllm-prefix": Preset(
        about="Fast-dLLM with the prefix cache",
        dllm={**_FAST, "cache_mode": "prefix"},
        max_new_tokens=256,
    ),
    "fast-dllm-dual": Preset(
        about="Fast-dLLM with the dual cache",
        dllm={**_FAST, "cache_mode": "dual"},
        max_new_tokens=256,
    ),
}


def markdown_table() -> str:
    """Returns the table of the documentation."""
    rows = ["| preset | settings |", "|---|---|"]
    for name, preset in PRESETS.items():
        shown = _shown(preset.dllm)
        if preset.max_new_tokens is not None:
            shown += f", `max_new_tokens` {preset.max_new_tokens}"
        for task, changed in preset.by_task.items():
            shown += f"; {task}: {_shown(changed)}"
        rows.append(f"| `{name}` | {preset.about}: {shown} |")
    return "\n".join(rows)


def _shown(options: Options) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in options.items())
