"""jdllm: serving diffusion language models fast and honestly, in JAX.

The names below load on first use, so that `import jdllm` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jdllm.version import __version__

if TYPE_CHECKING:
    from jdllm.engine.engine import Engine
    from jdllm.engine.image_engine import ImageEngine
    from jdllm.engine.llm import LLM
    from jdllm.runner.full_forward import load_model
    from jdllm.sampling_params import SamplingParams

__all__ = ["LLM", "Engine", "ImageEngine", "SamplingParams", "__version__", "load_model"]

_HOME = {
    "Engine": "jdllm.engine.engine",
    "ImageEngine": "jdllm.engine.image_engine",
    "LLM": "jdllm.engine.llm",
    "SamplingParams": "jdllm.sampling_params",
    "load_model": "jdllm.runner.full_forward",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jdllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
