"""Which arguments statistics of the logits accept."""

import jax.numpy as jnp


def check_shapes(x, w, forbidden_ids, given_ids, draw_keys, temperature, num_rows) -> None:
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
    T, V = x.shape[0], w.shape[0]
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
        f"{name} must be [T]": arrays[name] is not None and arrays[name].shape != (T,)
        for name in ("given_ids", "temperature")
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"unembed_stats: {problem}: {shapes}")
