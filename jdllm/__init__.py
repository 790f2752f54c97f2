"""jdllm: serving diffusion language models fast and honestly, in JAX.

The names below load on first use, so that `import jdllm` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jdllm.version import __version__

if TYPE_CHECKING:
    from jdllm.decoding import register as register_algorithm
    from jdllm.decoding.block.fill import BlockRule
    from jdllm.decoding.canvas.fill import CanvasRule
    from jdllm.engine.engine import Engine
    from jdllm.engine.images.engine import ImageEngine
    from jdllm.engine.llm import LLM
    from jdllm.eval.offline_sweep import sweep
    from jdllm.options.sampling_params import SamplingParams
    from jdllm.runner.full_forward import load_model

__all__ = [
    "LLM",
    "BlockRule",
    "CanvasRule",
    "Engine",
    "ImageEngine",
    "SamplingParams",
    "__version__",
    "load_model",
    "register_algorithm",
    "sweep",
]

# name -> its module, and its name there
_HOME = {
    "BlockRule": ("jdllm.decoding.block.fill", "BlockRule"),
    "CanvasRule": ("jdllm.decoding.canvas.fill", "CanvasRule"),
    "Engine": ("jdllm.engine.engine", "Engine"),
    "ImageEngine": ("jdllm.engine.images.engine", "ImageEngine"),
    "LLM": ("jdllm.engine.llm", "LLM"),
    "SamplingParams": ("jdllm.options.sampling_params", "SamplingParams"),
    "load_model": ("jdllm.runner.full_forward", "load_model"),
    "register_algorithm": ("jdllm.decoding", "register"),
    "sweep": ("jdllm.eval.offline_sweep", "sweep"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jdllm' has no attribute {name!r}")
    module, found = _HOME[name]
    return getattr(importlib.import_module(module), found)
