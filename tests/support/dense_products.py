"""Dense products with weights [columns, contraction]: problems for kernels, answers by numpy."""

import jax.numpy as jnp
import numpy as np
from support import kernel_interpreter

TOLERANCE = {"rtol": 2**-7, "atol": 1e-4}  # one rounding to bfloat16, float32 sums


def arrays(tokens, columns, contraction, swiglu, seed=0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, contraction))
    w = rng.normal(size=((1 + swiglu) * columns, contraction)) * contraction**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def expected(x, w, swiglu):
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    if not swiglu:
        return y
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def expected_parts(x, w, swiglu, splits):
    """The results of each part of the contraction."""
    if splits == 1:
        return [expected(x, w, swiglu)]
    pairs = zip(np.split(x, splits, axis=1), np.split(w, splits, axis=1), strict=True)
    return [expected(x_part, w_part, False) for x_part, w_part in pairs]


def interpreted(kernel, x, w, **options):
    outs = kernel_interpreter.run(kernel, x, w, **options)
    assert all(out.dtype == x.dtype for out in outs)
    return [np.asarray(out.astype(jnp.float32)) for out in outs]


def check_equals_numpy(kernel, tokens, columns, contraction, swiglu, tile):
    x, w = arrays(tokens, columns, contraction, swiglu)
    outs = interpreted(kernel, x, w, swiglu=swiglu, tile=tile)
    for out, want in zip(outs, expected_parts(x, w, swiglu, tile.splits), strict=True):
        np.testing.assert_allclose(out, want, **TOLERANCE)


def check_rows_are_their_own(kernel, tokens, columns, contraction, swiglu, tile):
    """Other neighbours change no bit of a row, and NaN stays in its row."""
    x, w = arrays(tokens, columns, contraction, swiglu)
    watched = np.array([1, tokens // 2, tokens - 1])
    others, _ = arrays(tokens, columns, contraction, swiglu, seed=1)
    others = others.at[::2].set(jnp.nan).at[watched].set(x[watched])
    broken = np.isnan(np.asarray(others, np.float32)).any(axis=1)
    options = {"swiglu": swiglu, "tile": tile}
    firsts = interpreted(kernel, x, w, **options)
    for first, second in zip(firsts, interpreted(kernel, others, w, **options), strict=True):
        np.testing.assert_array_equal(first[watched], second[watched])
        wanted = np.broadcast_to(broken[:, None], second.shape)
        np.testing.assert_array_equal(np.isnan(second), wanted)
