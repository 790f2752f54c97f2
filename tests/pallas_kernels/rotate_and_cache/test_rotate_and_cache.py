"""The op by XLA equals numpy: bias, norm per head, rotation, K and V at their kv_indices."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.rotate_and_cache import api

N, K, H, PAGES, PAGE = 4, 2, 16, 3, 8
EPS = 1e-6


def case(T=5, rotary_dim=8, seed=0, parts=1):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    angles = rng.uniform(0, 6, (T, rotary_dim // 2)).astype(np.float32)
    return {
        "qkv": tuple(draw(T, (N + 2 * K) * H) for _ in range(parts)),
        "bias": draw((N + 2 * K) * H),
        "norm_weights": (draw(H), draw(H)),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "pool": draw(PAGES, 2, K, PAGE, H),
        "kv_indices": rng.permutation(PAGES * PAGE)[:T].astype(np.int32),
    }


def run(arguments, **options):
    return pallas_kernels.rotate_and_cache(
        **arguments, num_query_heads=N, num_kv_heads=K, eps=EPS, **options
    )


def by_hand(qkv, bias, norm_weights, cos, sin, pool, kv_indices):
    """Computes the op in numpy, token by token and head by head."""
    pool, half = pool.copy(), cos.shape[1]
    q = np.zeros((len(kv_indices), N, H), np.float32)
    for t, row in enumerate(sum(qkv) if bias is None else sum(qkv) + bias):
        for head, x in enumerate(row.reshape(N + 2 * K, H)):
            if head < N + K:
                if norm_weights is not None:
                    x = x / np.sqrt(np.mean(x * x) + EPS) * norm_weights[head >= N]
                a, b = x[:half], x[half : 2 * half]
                x = np.concatenate(
                    [a * cos[t] - b * sin[t], b * cos[t] + a * sin[t], x[2 * half :]]
                )
            if head < N:
                q[t, head] = x
            elif kv_indices[t] < PAGES * PAGE:
                part, kv_head = divmod(head - N, K)
                pool[kv_indices[t] // PAGE, part, kv_head, kv_indices[t] % PAGE] = x
    return q, pool


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rotary_dim", [8, 16])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("norm_weights",), ("bias", "norm_weights")])
def test_equals_numpy(rotary_dim, left_out, parts):
    arguments = case(rotary_dim=rotary_dim, parts=parts) | dict.fromkeys(left_out)
    arguments["kv_indices"][2] = PAGES * PAGE + 1  # padding
    for ours, expected in zip(run(arguments), by_hand(**arguments), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_heads_are_those_that_the_pool_gets():
    arguments = case()
    _, pool = run(arguments)
    rest = {name: arguments[name] for name in ("qkv", "bias", "norm_weights", "cos", "sin")}
    _, k, v = pallas_kernels.rotated_heads(**rest, num_query_heads=N, num_kv_heads=K, eps=EPS)
    page, offset = np.divmod(arguments["kv_indices"], PAGE)
    np.testing.assert_allclose(pool[page, 0, :, offset], k, atol=1e-6)  # one is jitted
    np.testing.assert_array_equal(pool[page, 1, :, offset], v)


def test_nan_touches_its_own_token_alone():
    arguments = case()
    clean = run(arguments)
    (qkv,) = arguments["qkv"]
    dirty = run(arguments | {"qkv": (np.where(np.arange(5)[:, None] == 3, np.nan, qkv),)})
    others = np.arange(5) != 3
    np.testing.assert_array_equal(clean[0][others], dirty[0][others])
    assert np.isnan(np.asarray(dirty[1])).sum() == 2 * K * H


def test_wrong_shapes_are_refused_with_the_shapes():
    arguments = case()
    (qkv,) = arguments["qkv"]
    for wrong, message in (
        ({"qkv": (qkv, qkv[:, 1:])}, r"qkv \[\(5, 128\), \(5, 127\)\]"),
        ({"qkv": ()}, r"qkv \[\]"),
        ({"bias": np.zeros(3, np.float32)}, r"bias \(3,\)"),
        ({"kv_indices": np.zeros(4, np.int32)}, r"kv_indices \(4,\)"),
        ({"norm_weights": (np.zeros(H), np.zeros(8))}, r"norm weights \[\(16,\), \(8,\)\]"),
        ({"pool": np.zeros((PAGES, 2, K + 1, PAGE, H))}, r"pool \(3, 2, 3, 8, 16\)"),
    ):
        with pytest.raises(ValueError, match=f"rotate_and_cache: .*{message}"):
            run(arguments | wrong)


def test_what_the_kernel_cannot_serve_has_a_reason():
    def reason(**changed):
        sizes = {"dtype": jnp.bfloat16, "pool_dtype": jnp.bfloat16, "head_dim": 128}
        sizes |= {"rotary_dim": 128} | changed
        with pytest.raises(ValueError, match="rotate_and_cache: mosaic_gpu cannot run here") as e:
            api.choose("mosaic_gpu", **sizes)
        return str(e.value)

    assert "NVIDIA GPU" in reason()
    assert api.choose(
        dtype=jnp.float32, pool_dtype=jnp.float32, head_dim=128, rotary_dim=128
    ).refusals
