"""Which arguments the fused norm accepts."""

import jax


def check_shapes(x: jax.Array, added: tuple[jax.Array, ...], weight: jax.Array) -> None:
    """Raises ValueError if the arrays do not fit together."""
    wrong = [part for part in added if part.shape != x.shape or part.dtype != x.dtype]
    if x.ndim != 2 or not added or wrong or weight.shape != x.shape[1:]:
        raise ValueError(
            f"add_rms_norm: x and all that is added must be [T, D] of one dtype and weight [D]: "
            f"x {x.dtype}{x.shape}, added {[f'{a.dtype}{a.shape}' for a in added]}, "
            f"weight {weight.shape}"
        )
