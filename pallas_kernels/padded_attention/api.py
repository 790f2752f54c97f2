"""Attention inside rows that are padded to one length.

No pages and no mask: each row has a length, and every query sees the keys before it, or those of
them that do not follow the query (`is_causal`). cuDNN reads the lengths itself; a mask would cost
it a third of its speed.

Shape letters: B rows, T tokens of a padded row.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import dispatch

MAX_HEAD_DIM = 128


def choose(implementation: str = "auto", *, dtype: jnp.dtype, head_dim: int) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    return dispatch.choose(
        "padded_attention",
        implementation,
        refusals={"cudnn": _why_not_cudnn(dtype=dtype, head_dim=head_dim)},
    )


def padded_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int32[Array, " B"] | None = None,  # 1 to T; None: no row has padding
    *,
    is_causal: bool = False,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Returns `softmax(q @ k.T / sqrt(H)) @ v` of each row and head, over its first keys.

    N is a multiple of K: neighbouring heads of q share one of k and v.
    What stands past a row's length changes nothing before it, if it is finite. The output there is
    finite and means nothing.
    """
    is_whole = q.ndim == k.ndim == 4 and k.shape == v.shape
    if not is_whole or q.shape != (*k.shape[:2], q.shape[2], k.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            "q must be [B, T, N, H], k and v [B, T, K, H], N a multiple of K: "
            f"{q.shape=} {k.shape=} {v.shape=}"
        )
    chosen = choose(implementation, dtype=q.dtype, head_dim=q.shape[-1])
    return _padded_attention(
        q, k, v, lengths, is_causal=is_causal, implementation=chosen.implementation
    )


@functools.partial(jax.jit, static_argnames=("is_causal", "implementation"))
def _padded_attention(q, k, v, lengths, *, is_causal, implementation) -> jax.Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        key_value_seq_lengths=lengths,
        is_causal=is_causal,
        implementation=implementation,
    )


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    mask: Bool[Array, "B T T"],
    *,
    scale: float | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Returns the attention of each query to the keys where `mask` is true, at least one of them.

    Scores are multiplied by `scale`, by default 1 / sqrt(H).

    Both implementations have gradients. cuDNN keeps no array of T x T for them.
    """
    chosen = choose(implementation, dtype=q.dtype, head_dim=q.shape[-1])
    name = "cudnn" if chosen.implementation == "cudnn" else "xla"
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask[:, None], scale=scale, implementation=name
    )


def _why_not_cudnn(*, dtype: jnp.dtype, head_dim: int) -> str | None:
    if reason := dispatch.dtype_refusal(dtype):
        return reason
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 and at most {MAX_HEAD_DIM}, this is {head_dim}"
    return None
