"""Self-attention over packed tokens, independent of where K and V live.

A model calls `attend(projection, cache)`; the caller of the model chooses what `attend` does.
`paged_attend` writes K and V to the KV pool and reads the pool through the page table
(serving). `dense_attend` sees only the tokens of the call (training, logits, oracles). The
model code is the same for both.

Letters: those of the whole project, and R rows, M pages of the longest row, W = (N + 2K) * H.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from jdllm import spec
from jdllm.layers import low_rank, norm, rope


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """What a layer projected for its tokens, and what is needed to make q, k and v of it.

    `attend` does that when it suits: serving rotates q and k and writes the pool in one kernel.
    The sum of the arrays `qkv` holds q heads, then k heads, then v heads. `norm_weights` are those
    of q and of k. `attend` must obey `window` (see `AttentionConfig`).
    """

    qkv: tuple[Float[Array, "T W"], ...]
    bias: Float[Array, " W"] | None
    norm_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None
    rotation: rope.Rotation
    num_query_heads: int
    num_kv_heads: int
    eps: float
    window: int | None = None
    scale: float | None = None  # of the scores; None is head_dim ** -0.5

    def heads(self) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Returns (q, k, v), normalised, rotated and scaled."""
        q, k, v = pallas_kernels.rotated_heads(
            self.qkv,
            self.bias,
            self.norm_weights,
            self.rotation.cos,
            self.rotation.sin,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            eps=self.eps,
        )
        return self.scaled(q), k, v

    def scaled(self, q: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Returns rotated queries with the scale of their positions."""
        scale = self.rotation.query_scale
        return q if scale is None else (q * scale[:, None, None]).astype(q.dtype)


# attend(projection, cache) -> (out [T, N, H], cache)
Attend = Callable[[Projection, Array | None], tuple[Array, Array | None]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the packed tokens of a launch belong: their rows, pages and places of K,V.

    `kv_lens` counts context and in-flight tokens of a row, 0 for an inactive row. `kv_indices[t]`
    is the place `page * Z + offset` of token t in the pool. A place past the pool (never a
    negative one) drops the write; padding has such places.
    """

    cu_q_lens: Int32[Array, " R+1"]
    context_lens: Int32[Array, " R"]
    kv_lens: Int32[Array, " R"]
    page_table: Int32[Array, "R M"]
    kv_indices: Int32[Array, " T"]


def paged_attend(
    batch: PagedBatch,
    *,
    visibility: spec.AttentionPattern,
    block_size: int,
    q_len: int | None = None,
    causal_rows: Bool[Array, " R"] | None = None,
    implementation: str = "auto",
) -> Attend:
    """Returns an `attend` whose cache is one layer's pool [P, 2, K, Z, H].

    `q_len` promises that every row has this number of tokens, inactive rows too (decode). The
    tokens of `causal_rows` see no later ones, whatever the visibility of other rows; these need
    `q_len`. They are attended apart, and a row costs nothing where it is not attended.
    """

    def attention_of(
        projection: Projection, q: Array, pool: Array, kv_lens: Array, visibility: str
    ) -> Array:
        return pallas_kernels.extend_attention(
            q,
            pool,
            batch.cu_q_lens,
            batch.context_lens,
            kv_lens,
            batch.page_table,
            visibility=spec.AttentionPattern(visibility).value,
            block_size=block_size,
            scale=q.shape[-1] ** -0.5 if projection.scale is None else projection.scale,
            q_len=q_len,
            window=projection.window,
            implementation=implementation,
        )

    def attend(projection: Projection, pool: Array | None) -> tuple[Array, Array]:
        assert pool is not None, "every layer has a pool"
        q, written = pallas_kernels.rotate_and_cache(
            projection.qkv,
            projection.bias,
            projection.norm_weights,
            projection.rotation.cos,
            projection.rotation.sin,
            pool,
            batch.kv_indices,
            num_query_heads=projection.num_query_heads,
            num_kv_heads=projection.num_kv_heads,
            eps=projection.eps,
            implementation=implementation,
        )
        q = projection.scaled(q)
        if causal_rows is None:
            return attention_of(projection, q, written, batch.kv_lens, visibility), written
        assert q_len is not None, "rows of unknown lengths cannot be told apart"
        others = jnp.where(causal_rows, 0, batch.kv_lens)
        out = attention_of(projection, q, written, others, visibility)
        causal = jnp.where(causal_rows, batch.kv_lens, 0)
        seen = attention_of(projection, q, written, causal, spec.AttentionPattern.CAUSAL)
        return jnp.where(jnp.repeat(causal_rows, q_len)[:, None, None], seen, out), written

    return attend


Mask = Bool[Array | np.ndarray, "... S S"]


def dense_attend(
    mask: Mask,
    batch: int,
    *,
    of_windows: Mapping[int, Mask] | None = None,
    implementation: str = "xla",
) -> Attend:
    """Returns a differentiable `attend` over `batch` sequences flattened to [B * S].

    `mask` is bool [S, S] or [B, S, S], true where the query (row) sees the key; every query must
    see at least one key. `of_windows` holds the masks of layers with a window, by its length,
    since only the caller knows the positions. `attend` returns the cache unchanged.

    `implementation` "auto" takes cuDNN where it can, which rounds probabilities to the dtype of q.
    """
    masks = {None: mask, **(of_windows or {})}

    def attend(projection: Projection, cache: Array | None) -> tuple[Array, Array | None]:
        if projection.window not in masks:
            raise ValueError(f"dense_attend has no mask for window={projection.window}")
        mask = masks[projection.window]
        q, k, v = projection.heads()
        q4, k4, v4 = (x.reshape(batch, -1, *x.shape[1:]) for x in (q, k, v))
        row_masks = jnp.broadcast_to(mask, (batch, *mask.shape[-2:]))  # [B, S, S]
        out = pallas_kernels.masked_attention(
            q4, k4, v4, row_masks, scale=projection.scale, implementation=implementation
        )
        return out.reshape(q.shape), cache

    return attend


def visibility_mask(
    length: int, block_size: int, pattern: spec.AttentionPattern, *, window: int | None = None
) -> Bool[np.ndarray, "S S"]:
    """Returns a mask over `length` positions, true where the query (row) sees the key (column).

    With a window, a query sees no key that is `window` or more positions away.
    """
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    is_near = np.abs(query - key) < (length if window is None else window)
    match spec.AttentionPattern(pattern):
        case spec.AttentionPattern.BLOCK_CAUSAL:
            return (query // block_size >= key // block_size) & is_near
        case spec.AttentionPattern.FULL:
            return is_near
        case spec.AttentionPattern.CAUSAL:
            return (query >= key) & is_near


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Head counts and sizes of one attention layer; without `qk_norm_eps` q and k have no norm.

    With a `window`, a token sees only tokens that are fewer than `window` positions away. `scale`
    multiplies the scores, by default head_dim ** -0.5. With `normalizes_v`, each head of v has unit
    root mean square, without a weight; it needs `qk_norm_eps`. With `shares_kv`, v is the
    projection of k, before its norm. `out_adapter` is what tokens of drafts add to the projection
    of the output.
    """

    dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope: rope.RopeConfig
    qk_norm_eps: float | None = None
    has_qkv_bias: bool = False
    window: int | None = None
    scale: float | None = None
    normalizes_v: bool = False
    shares_kv: bool = False
    out_adapter: low_rank.LowRankConfig | None = None


class Attention(nnx.Module):
    """Grouped-query attention; per-head norms of q and k, if any, come before the rotation.

    `w_qkv` [(N + 2K) * H, D] and its bias `b_qkv`, if any, hold q, then k, then v; a layer whose v
    is its k has `w_qk` [(N + K) * H, D] instead. The cache holds K after norm and rotation.
    """

    def __init__(self, config: AttentionConfig, *, dtype: jnp.dtype, implementation: str = "auto"):
        self.config = config
        self.implementation = implementation
        q_width = config.num_query_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        qkv_width = q_width + (1 if config.shares_kv else 2) * kv_width
        weight = nnx.Param(jnp.zeros((qkv_width, config.dim), dtype))
        self.w_qkv, self.w_qk = (None, weight) if config.shares_kv else (weight, None)
        self.b_qkv = nnx.Param(jnp.zeros((qkv_width,), dtype)) if config.has_qkv_bias else None
        self.w_out = nnx.Param(jnp.zeros((config.dim, q_width), dtype))
        self.out_adapter = (
            None
            if config.out_adapter is None
            else low_rank.LowRank(config.out_adapter, q_width, config.dim, dtype=dtype)
        )
        self.query_layernorm = self._head_norm(dtype)
        self.key_layernorm = self._head_norm(dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotation: rope.Rotation,
        *,
        attend: Attend,
        cache: Array | None,
        drafts: Bool[Array, " T"] | None = None,
    ) -> tuple[tuple[Float[Array, "T D"], ...], Array | None]:
        """Returns (arrays whose sum is the output for `x`, new cache).

        The tokens that are `drafts` use the adapter; without it there are none.
        """
        with jax.named_scope("qkv"):
            weight = self.w_qk if self.w_qkv is None else self.w_qkv
            assert weight is not None, "a layer has one of them"
            qkv = pallas_kernels.dense_matmul(x, weight[...], implementation=self.implementation)
            if self.config.normalizes_v or self.config.shares_kv:
                qkv = (self._with_v(qkv),)
            projection = self._projection(qkv, rotation)
        with jax.named_scope("attend"):
            out, cache = attend(projection, cache)
        with jax.named_scope("attention_out"):
            flat = out.reshape(x.shape[0], -1)
            parts = pallas_kernels.dense_matmul(
                flat, self.w_out[...], implementation=self.implementation
            )
            if self.out_adapter is not None and drafts is not None:
                parts = (*parts, self.out_adapter(flat, drafts))
        return parts, cache

    def _with_v(self, parts: tuple[Float[Array, "T _"], ...]) -> Float[Array, "T W"]:
        """Returns q, k and v side by side, with v made of k and normalised as the layer wants."""
        config, whole = self.config, functools.reduce(jnp.add, parts)
        kv_width = config.num_kv_heads * config.head_dim
        before_v = whole if config.shares_kv else whole[:, :-kv_width]
        v = whole[:, -kv_width:].reshape(len(whole), config.num_kv_heads, config.head_dim)
        if config.normalizes_v:
            assert config.qk_norm_eps is not None, "the norm of v has the eps of the other norms"
            v = pallas_kernels.rms_norm(
                v, jnp.ones((config.head_dim,), v.dtype), config.qk_norm_eps
            )
        return jnp.concatenate([before_v, v.reshape(len(whole), kv_width)], axis=1)

    def _projection(
        self, qkv: tuple[Float[Array, "T W"], ...], rotation: rope.Rotation
    ) -> Projection:
        norms, (q_norm, k_norm) = None, (self.query_layernorm, self.key_layernorm)
        if q_norm is not None and k_norm is not None:
            norms = (q_norm.weight[...], k_norm.weight[...])
        return Projection(
            qkv=qkv,
            bias=None if self.b_qkv is None else self.b_qkv[...],
            norm_weights=norms,
            rotation=rotation,
            num_query_heads=self.config.num_query_heads,
            num_kv_heads=self.config.num_kv_heads,
            eps=self.config.qk_norm_eps or 0.0,
            window=self.config.window,
            scale=self.config.scale,
        )

    def _head_norm(self, dtype: jnp.dtype) -> norm.RMSNorm | None:
        eps = self.config.qk_norm_eps
        return None if eps is None else norm.RMSNorm(self.config.head_dim, eps=eps, dtype=dtype)
