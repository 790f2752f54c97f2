"""The ops of `pallas_kernels` at the shapes of the models, as cases to be timed and checked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import floors
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

BF16 = jnp.bfloat16
L2_BYTES = 60e6


class Call(Protocol):
    """Calls an op; returns the next carry."""

    def __call__(self, carry: Any, inputs: Any, /, implementation: str) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one shape.

    `call` gets one of `sets` as its inputs. `compare(result, reference)` describes how close the
    two are.
    """

    op: str
    shape: str
    work: floors.Work
    implementations: tuple[str, ...]
    carry: Any
    sets: tuple[Any, ...]
    call: Call
    compare: Callable[[Any, Any], str]


def _relative_error(result: Any, reference: Any) -> str:
    result, reference = result.astype(jnp.float32), reference.astype(jnp.float32)
    error = jnp.linalg.norm((result - reference).ravel()) / jnp.linalg.norm(reference.ravel())
    return f"{float(error):.1e}"


def _normal(seed: int, *shape: int, std: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BF16) * jnp.asarray(std, BF16)


def _num_sets(bytes_of_one: float) -> int:
    return int(min(8, max(2, -(-3 * L2_BYTES // bytes_of_one))))


def moe(*, T: int, E: int = 256, k: int = 8, D: int = 2048, I: int = 512) -> Case:  # noqa: E741
    """One mixture-of-experts layer under uniform routing."""
    rng = np.random.default_rng(0)

    def one(seed: int) -> dict[str, Any]:
        ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
        weights = rng.uniform(0.1, 1.0, (T, k)).astype(np.float32)
        return {
            "w_gate_up": _normal(seed, E, 2 * I, D, std=D**-0.5),
            "w_down": _normal(seed + 100, E, D, I, std=I**-0.5),
            "expert_ids": jnp.asarray(ids),
            "expert_weights": jnp.asarray(2.5 * weights / weights.sum(1, keepdims=True)),
        }

    sets = tuple(one(seed) for seed in range(2))
    hit = np.mean([len(np.unique(one_set["expert_ids"])) for one_set in sets])

    def call(x: jax.Array, inputs: dict[str, Any], implementation: str) -> jax.Array:
        return pallas_kernels.grouped_matmul(
            x,
            **inputs,
            valid=jnp.ones(x.shape[:1], bool),
            out_dtype=x.dtype,
            implementation=implementation,
        )

    return Case(
        op="moe",
        shape=f"T={T} E={E} top-{k} D={D} I={I}, {hit:.0f} hit",
        work=floors.experts(T, hit=float(hit), experts_per_token=k, expert_params=3 * D * I),
        implementations=("mosaic_gpu", "xla"),
        carry=_normal(9, T, D),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def attention(
    *, B: int, S: int, L: int = 32, N: int = 16, K: int = 4, H: int = 128, page: int = 64,
    block: int = 32, full: bool = False,
) -> Case:  # fmt: skip
    """Attention of B rows; a row's L in-flight tokens are the last of its S keys.

    It is a prefill if L is S. With `full`, the rows are windows of canvases, of any length, and
    their tokens see all S keys.
    """
    M = -(-S // page)
    rng = np.random.default_rng(0)
    table = rng.permutation(B * M).astype(np.int32).reshape(B, M)
    dead = np.arange(M * page).reshape(M, 1, page, 1) >= S  # of a row's pages

    def pool(seed: int) -> jax.Array:
        values = _normal(seed, B * M, 2, K, page, H)
        rows = jnp.where(dead[None, :, None], jnp.asarray(jnp.nan, BF16), values[table])
        return values.at[table].set(rows)

    sets = tuple(pool(seed) for seed in range(_num_sets(B * S * K * H * 4)))
    first_block = (S - L) // block + 1
    seen = sum(min(S, (first_block + i) * block) for i in range(L // block)) * block
    if full:
        seen = L * S

    def call(q: jax.Array, kv_pool: jax.Array, implementation: str) -> jax.Array:
        pages = jnp.asarray(table)
        if implementation != "mosaic_gpu":  # else XLA would gather a set's pages only once
            pages = pages + jnp.isnan(q[0, 0, 0]).astype(jnp.int32)
        return pallas_kernels.extend_attention(
            q,
            kv_pool,
            jnp.arange(B + 1, dtype=jnp.int32) * L,
            jnp.full((B,), S - L, jnp.int32),
            jnp.full((B,), S, jnp.int32),
            pages,
            visibility="full" if full else "block_causal",
            block_size=8 if full else block,
            scale=H**-0.5,
            q_len=None if full or L == S else L,
            implementation=implementation,
        )

    return Case(
        op="canvas" if full else "prefill" if L == S else "attention",
        shape=f"B={B} L={L} S={S} heads {N}/{K}x{H} page {page}",
        work=floors.attention(
            scores=B * seen, kv_tokens=B * S, query_heads=N, kv_heads=K, head_dim=H
        ),
        implementations=("mosaic_gpu", *["cudnn"] * (L < S and not full), "xla"),
        carry=_normal(99, B * L, N, H),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def cudnn_dense(*, B: int, S: int, L: int = 32, N: int = 16, K: int = 4, H: int = 128) -> Case:
    """cuDNN for the same rows with contiguous K and V: no paging, no gather."""
    sets = tuple(
        (_normal(seed, B, S, K, H), _normal(seed + 50, B, S, K, H))
        for seed in range(_num_sets(B * S * K * H * 4))
    )

    def call(q: jax.Array, inputs: tuple[jax.Array, jax.Array], implementation: str) -> jax.Array:
        assert implementation == "cudnn"
        return jax.nn.dot_product_attention(q, *inputs, implementation=implementation)

    return Case(
        op="dense",
        shape=f"B={B} L={L} S={S} heads {N}/{K}x{H}, contiguous K,V",
        work=floors.attention(
            scores=B * L * S, kv_tokens=B * S, query_heads=N, kv_heads=K, head_dim=H
        ),
        implementations=("cudnn",),
        carry=_normal(99, B, L, N, H),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def unembed(*, T: int, V: int = 157184, D: int = 2048, draws: bool = False) -> Case:
    """The LM head's statistics of T tokens: one forbidden id, a given id per row, maybe a draw."""
    x = _normal(7, T, D)
    drawing: dict[str, Any] = {
        "draw_keys": jax.random.bits(jax.random.key(8), (T, 2), jnp.uint32),
        "temperature": jnp.full((T,), 0.8, jnp.float32),
    }
    sets = tuple(_normal(seed, V, D, std=D**-0.5) for seed in range(2))

    def call(carry: Any, w: jax.Array, implementation: str) -> Any:
        given_ids, before = carry
        states = x.astype(w.dtype)
        if implementation != "mosaic_gpu":  # else XLA would multiply only once
            states = states * jnp.where(jnp.isnan(before[0]), 2, 1).astype(w.dtype)
        stats = pallas_kernels.unembed_stats(
            states,
            w,
            forbidden_ids=(V - 5,),
            given_ids=given_ids,
            implementation=implementation,
            **(drawing if draws else {}),
        )
        return stats.best_id, stats.logsumexp + stats.entropy + stats.second_logit

    def compare(result: Any, reference: Any) -> str:
        same = float((result[0] == reference[0]).mean())
        return f"ids {same:.4f}, statistics {float(jnp.abs(result[1] - reference[1]).max()):.1e}"

    no_ids = jnp.zeros((T,), jnp.int32), jnp.zeros((T,), jnp.float32)
    return Case(
        op="unembed",
        shape=f"T={T} V={V} D={D}" + (" with a draw" if draws else ""),
        work=floors.matmul(T, V * D),
        implementations=("mosaic_gpu", "xla"),
        carry=no_ids,
        sets=sets,
        call=call,
        compare=compare,
    )


def mlp(*, T: int, D: int, F: int) -> Case:
    """A dense feed-forward (`swiglu_matmul`, `dense_matmul`) and the norm that adds its parts."""

    def one(seed: int) -> tuple[jax.Array, jax.Array]:
        return _normal(seed, 2 * F, D, std=D**-0.5), _normal(seed + 50, D, F, std=F**-0.5)

    sets = tuple(one(seed) for seed in range(_num_sets(6 * D * F)))

    def call(x: jax.Array, inputs: tuple[jax.Array, jax.Array], implementation: str) -> jax.Array:
        w_gate_up, w_down = inputs
        h = pallas_kernels.swiglu_matmul(x, w_gate_up, implementation=implementation)
        parts = pallas_kernels.dense_matmul(h, w_down, implementation=implementation)
        return pallas_kernels.add_rms_norm(x, parts, jnp.ones((D,), x.dtype), eps=1e-5)[1]

    return Case(
        op="mlp",
        shape=f"T={T} D={D} F={F}, norm included",
        work=floors.matmul(T, 3 * D * F),
        implementations=("mosaic_gpu", "xla"),
        carry=_normal(99, T, D),
        sets=sets,
        call=call,
        compare=_relative_error,
    )


def matmul(*, T: int, N: int, K: int, swiglu: bool = False) -> Case:
    """A dense product of T tokens; if it narrows, the norm that adds its parts is included."""
    narrows = N <= K and not swiglu
    sets = tuple(
        _normal(seed, (1 + swiglu) * N, K, std=K**-0.5)
        for seed in range(_num_sets((1 + swiglu) * N * K * 2))
    )

    def call(carry: Any, w: jax.Array, implementation: str) -> Any:
        x, stream = carry
        if swiglu:
            outs = (pallas_kernels.swiglu_matmul(x, w, implementation=implementation),)
        else:
            outs = pallas_kernels.dense_matmul(x, w, implementation=implementation)
        if narrows:
            ones = jnp.ones((N,), x.dtype)
            outs = pallas_kernels.add_rms_norm(stream, outs, ones, eps=1e-5)
        # Without the barrier XLA would compute only the values that are used. One value of x
        # depends on the result, so that no call is hoisted or left out; that costs a tiny launch.
        out = jax.lax.optimization_barrier(outs)[-1]
        return x.at[0, 0].set(out[0, 0]), out

    def compare(result: Any, reference: Any) -> str:
        return _relative_error(result[1], reference[1])

    kind = " SwiGLU" if swiglu else ", norm included" if narrows else ""
    return Case(
        op="matmul",
        shape=f"T={T} N={N} K={K}{kind}",
        work=floors.matmul(T, (1 + swiglu) * N * K),
        implementations=("mosaic_gpu", "xla"),
        carry=(_normal(98, T, K), _normal(99, T, N)),
        sets=sets,
        call=call,
        compare=compare,
    )


def rotate(*, T: int, N: int, K: int, rotary: int = 128, H: int = 128, norm: bool = False) -> Case:
    """Rotation of q and k, and the write of K,V into a pool with pages of 64 tokens."""
    rng = np.random.default_rng(0)
    page, width = 64, (N + 2 * K) * H
    pages = T // page + 64
    angles = rng.uniform(0, 4000, (T, rotary // 2)).astype(np.float32)
    kv_indices = rng.permutation(pages * page)[:T].astype(np.int32)
    given = {
        "bias": None,
        "norm_weights": (_normal(1, H), _normal(2, H)) if norm else None,
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "kv_indices": jnp.asarray(kv_indices),
    }

    def call(carry: Any, inputs: Any, implementation: str) -> Any:
        qkv, pool, _ = carry
        q, pool = pallas_kernels.rotate_and_cache(
            (qkv,), **inputs, pool=pool, num_query_heads=N, num_kv_heads=K, eps=1e-6,
            implementation=implementation,
        )  # fmt: skip
        return qkv, pool, q

    def compare(result: Any, reference: Any) -> str:
        pairs = zip(result[1:], reference[1:], strict=True)
        return ", ".join(_relative_error(ours, theirs) for ours, theirs in pairs)

    return Case(
        op="rotate",
        shape=f"T={T} heads {N}/{K}x{H} rotary {rotary}" + (" with norm" if norm else ""),
        work=floors.Work(bytes=2 * T * width * floors.BF16_BYTES, flops=0),
        implementations=("mosaic_gpu", "xla"),
        carry=(_normal(3, T, width), _normal(4, pages, 2, K, page, H), _normal(5, T, N, H)),
        sets=(given,),
        call=call,
        compare=compare,
    )


def _cases(build: Callable[..., Case], *shapes: dict[str, int]) -> list[Any]:
    return [functools.partial(build, **shape) for shape in shapes]


def _rows(**sizes: Any) -> Iterator[dict[str, int]]:
    """Yields one shape for each value of the first size; the other sizes are fixed."""
    (name, values), *fixed = sizes.items()
    for value in values:
        yield {name: value} | dict(fixed)


CASES: dict[str, list[Any]] = {
    "moe": _cases(
        moe,
        *_rows(T=(32, 128, 512, 2048, 8192, 16384)),
        *_rows(T=(32, 512), D=4096, I=1024),  # LLaDA2.0-flash
        *_rows(T=(32, 256), E=128, D=2048, I=768),  # SDAR-30B-A3B
    ),
    "attention": _cases(
        attention,
        *_rows(B=(1, 4, 16, 64), S=2048),
        *_rows(B=(1, 4), S=4096),
        *_rows(B=(1, 4, 16, 64), S=544),
        *_rows(B=(1, 4, 16), S=544, N=32, K=32),  # LLaDA-8B
        *_rows(B=(4, 64), S=2048, L=4, block=4, N=32, K=8),  # SDAR-8B
        {"B": 16, "S": 2048, "L": 64},  # two in-flight blocks
    ),
    "canvas": _cases(
        attention,
        *_rows(L=(64, 128, 192, 256, 384), B=1, S=384, N=32, K=32, full=True),  # LLaDA-8B
        *_rows(L=(64, 128, 256, 384), B=1, S=384, N=28, K=4, full=True),  # Dream-7B
        *_rows(L=(64, 128, 256), B=1, S=4096, N=32, K=32, full=True),
    ),
    "dense": _cases(cudnn_dense, *_rows(B=(16, 64), S=2048)),
    "prefill": _cases(
        attention,
        {"B": 1, "S": 8192, "L": 8192, "N": 32, "K": 32},
        {"B": 8, "S": 2048, "L": 2048, "N": 32, "K": 32},
        {"B": 1, "S": 8192, "L": 8192, "N": 16, "K": 4},
        {"B": 8, "S": 2048, "L": 2048, "N": 16, "K": 4},
    ),
    "unembed": _cases(
        unembed,
        *_rows(T=(32, 64, 128, 256, 512, 1024, 2048)),
        *_rows(T=(32, 128, 512), V=126464, D=4096),  # LLaDA-8B
        *_rows(T=(32, 512), draws=True),
    ),
    "mlp": _cases(
        mlp,
        *_rows(T=(32, 64, 128, 256), D=4096, F=12288),  # LLaDA-8B
        *_rows(T=(64, 128), D=3584, F=18944),  # Dream-7B
        *_rows(T=(32, 128), D=2048, F=5120),  # the first layer of LLaDA2.0-mini
    ),
    "matmul": _cases(
        matmul,
        *_rows(T=(192, 256, 384), N=12288, K=4096, swiglu=True),  # LLaDA-8B
        *_rows(T=(192, 256, 384), N=12288, K=4096),
        *_rows(T=(192, 256, 384), N=4096, K=12288),
        *_rows(T=(192, 256, 384), N=4096, K=4096),
    ),
    "rotate": _cases(
        rotate,
        *_rows(T=(32, 128, 384), N=32, K=32),
        *_rows(T=(128,), N=28, K=4),
        *_rows(T=(32, 512, 2048, 8192), N=16, K=4, rotary=64, norm=True),
    ),
}
