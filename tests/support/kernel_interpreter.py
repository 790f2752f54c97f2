"""The Mosaic GPU interpreter with its race detector, for kernel tests (jax >= 0.11.1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu


def interpret_params() -> plgpu.InterpretGPUParams:
    """Returns interpreter parameters that look for races."""
    return plgpu.InterpretGPUParams(detect_races=True)


def assert_no_races() -> None:
    """Fails if the last interpreted kernel raced: jax 0.11 only prints a race it detects."""
    assert not interpreter.get_races().races_found


def run(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns `kernel(*args, **options)` interpreted; fails if it raced."""
    with fresh_interpreter():
        result = kernel(*args, **options, interpret=interpret_params())
        # Races are known only once the kernels, which run asynchronously, have ended.
        jax.block_until_ready(result)
        assert_no_races()
    return result


@contextlib.contextmanager
def fresh_interpreter() -> Iterator[None]:
    """Resets the interpreter if the body raises: its state outlives an exception."""
    try:
        yield
    except BaseException:
        interpreter.reset_gpu_interpret_mode_state()
        raise
