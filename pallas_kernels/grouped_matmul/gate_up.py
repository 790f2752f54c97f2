"""The order of gate and up rows of SwiGLU in one array: a group of gate rows, then its up rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

AnyArray = jax.Array | np.ndarray


def gate_up_group(intermediate_size: int) -> int:
    """Returns the size of a group in `w_gate_up`: gate rows before the same number of up rows."""
    return 64 if intermediate_size % 64 == 0 else intermediate_size


def interleave_gate_up(
    gate: Shaped[AnyArray, "*lead I D"], up: Shaped[AnyArray, "*lead I D"]
) -> Shaped[AnyArray, "*lead 2*I D"]:
    """Returns gate and up in one array; numpy arrays give a numpy array."""
    *lead, size, width = gate.shape
    group = gate_up_group(size)
    grouped = (*lead, size // group, group, width)
    stack = np.stack if isinstance(gate, np.ndarray) else jnp.stack
    both = stack([gate.reshape(grouped), up.reshape(grouped)], axis=-3)
    return both.reshape(*lead, 2 * size, width)


def split_gate_up(
    w_gate_up: Shaped[AnyArray, "*lead 2*I D"],
) -> tuple[Shaped[AnyArray, "*lead I D"], Shaped[AnyArray, "*lead I D"]]:
    """Returns (gate, up): the inverse of `interleave_gate_up`."""
    *lead, size, width = w_gate_up.shape
    group = gate_up_group(size // 2)
    grouped = w_gate_up.reshape(*lead, size // 2 // group, 2, group, width)
    gate, up = (grouped[..., part, :, :].reshape(*lead, size // 2, width) for part in (0, 1))
    return gate, up
