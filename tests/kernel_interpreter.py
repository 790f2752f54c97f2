"""The Mosaic GPU interpreter with its race detector, for kernel tests (jax >= 0.11.1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu


def interpret_params() -> plgpu.InterpretGPUParams:
    """Returns interpreter parameters that look for races."""
    return plgpu.InterpretGPUParams(detect_races=True)


def assert_no_races() -> None:
    """Fails if the last interpreted kernel raced: jax 0.11 only prints a race it detects."""
    assert not interpreter.get_races().races_found


@contextlib.contextmanager
def fresh_interpreter() -> Iterator[None]:
    """Resets the interpreter if the body raises: its state outlives an exception."""
    try:
        yield
    except BaseException:
        interpreter.reset_gpu_interpret_mode_state()
        raise
