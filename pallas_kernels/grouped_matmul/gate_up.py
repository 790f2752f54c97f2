"""How gate and up rows of SwiGLU lie in one array: groups of gate rows before their up rows."""

import jax.numpy as jnp
import numpy as np


def gate_up_group(intermediate_size: int) -> int:
    """Returns how many gate rows are followed by as many up rows in `w_gate_up`."""
    return 64 if intermediate_size % 64 == 0 else intermediate_size


def interleave_gate_up(gate, up):
    """Returns [..., 2 * I, D] from gate and up [..., I, D]; numpy stays numpy."""
    *lead, size, width = gate.shape
    group = gate_up_group(size)
    grouped = (*lead, size // group, group, width)
    stack = np.stack if isinstance(gate, np.ndarray) else jnp.stack
    both = stack([gate.reshape(grouped), up.reshape(grouped)], axis=-3)
    return both.reshape(*lead, 2 * size, width)


def split_gate_up(w_gate_up):
    """Returns (gate, up), each [..., I, D]: the inverse of `interleave_gate_up`."""
    *lead, size, width = w_gate_up.shape
    group = gate_up_group(size // 2)
    grouped = w_gate_up.reshape(*lead, size // 2 // group, 2, group, width)
    return tuple(grouped[..., part, :, :].reshape(*lead, size // 2, width) for part in (0, 1))
