"""Which arguments the experts accept."""

import jax
import jax.numpy as jnp


def check_shared(x: jax.Array, shared: tuple[jax.Array, jax.Array] | None) -> None:
    """Raises ValueError if the shared expert does not fit the tokens."""
    if shared is None:
        return
    w_gate_up, w_down = shared
    D, size = x.shape[1], w_down.shape[-1]
    if w_gate_up.shape != (2 * size, D) or w_down.shape != (D, size):
        raise ValueError(
            f"grouped_matmul: shared must be [2 * I, D] and [D, I]: x {x.shape}, "
            f"shared {w_gate_up.shape}, {w_down.shape}"
        )


def check_shapes(
    x: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    valid: jax.Array | None,
) -> None:
    """Raises ValueError if the arrays do not fit together."""
    shapes = (
        f"x {x.dtype}{x.shape}, w_gate_up {w_gate_up.dtype}{w_gate_up.shape}, "
        f"w_down {w_down.dtype}{w_down.shape}, expert_ids {expert_ids.shape}, "
        f"expert_weights {expert_weights.shape}, valid {None if valid is None else valid.shape}"
    )
    if (x.ndim, w_gate_up.ndim, w_down.ndim, expert_ids.ndim) != (2, 3, 3, 2):
        raise ValueError(f"grouped_matmul: ranks must be (2, 3, 3, 2): {shapes}")
    T, D = x.shape
    E, _, size = w_down.shape
    problems = {
        "w_gate_up must be [E, 2 * I, D]": w_gate_up.shape != (E, 2 * size, D),
        "w_down must be [E, D, I]": w_down.shape[1] != D,
        "x and the weights must have one dtype": not (x.dtype == w_gate_up.dtype == w_down.dtype),
        "expert_ids must be [T, k]": expert_ids.shape[0] != T,
        "expert_weights must have the shape of expert_ids": expert_weights.shape
        != expert_ids.shape,
        "valid must be bool [T]": valid is not None
        and (valid.shape != (T,) or valid.dtype != jnp.bool_),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"grouped_matmul: {problem}: {shapes}")
