"""Which arguments statistics of the logits accept."""

import jax
import jax.numpy as jnp


def check_shapes(
    x: jax.Array,
    w: jax.Array,
    forbidden_ids: tuple[int, ...],
    given_ids: jax.Array | None,
    draw_keys: jax.Array | None,
    temperature: jax.Array | None,
    num_rows: jax.Array | None,
    num_ranks: int = 1,
) -> None:
    """Raises ValueError if the arrays and ids do not fit together.

    With `num_ranks`, `w` has the rows of one of them.
    """
    arrays = {
        "x": x, "w": w, "given_ids": given_ids, "draw_keys": draw_keys, "temperature": temperature,
        "num_rows": num_rows,
    }  # fmt: skip
    shapes = ", ".join(
        f"{name} {None if a is None else f'{a.dtype}{a.shape}'}" for name, a in arrays.items()
    )
    shapes += f", {forbidden_ids=}"
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"unembed_stats: x must be [T, D] and w [V, D]: {shapes}")
    T, V = x.shape[0], w.shape[0] * num_ranks
    problems = {
        "x and w must have one dtype": x.dtype != w.dtype,
        "x needs at least one row": T == 0,
        "forbidden ids must lie in [0, V)": any(not 0 <= i < V for i in forbidden_ids),
        "at least two ids must be allowed": V - len(set(forbidden_ids)) < 2,
        "draw_keys must be uint32 [T, 2]": draw_keys is not None
        and (draw_keys.shape != (T, 2) or draw_keys.dtype != jnp.uint32),
        "num_rows must be an int32 scalar": num_rows is not None
        and (num_rows.shape != () or num_rows.dtype != jnp.int32),
    } | {
        f"{name} must be [T]": array is not None and array.shape != (T,)
        for name, array in (("given_ids", given_ids), ("temperature", temperature))
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"unembed_stats: {problem}: {shapes}")
