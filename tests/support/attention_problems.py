"""Rows over pages for the attention kernel, NaN where it must not look, and loops over them.

NaN fills pages that no row owns, places past a row's length and padding queries, and unused table
entries hold wrong ids. So a result shows any use of them.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support import devices, kernel_interpreter

from pallas_kernels import device
from pallas_kernels.extend_attention import mosaic_gpu
from pallas_kernels.extend_attention.mosaic_gpu import AttentionTile

SMALL = AttentionTile(kv_tokens=64, stages=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A row is (context, in-flight), or None if inactive; with q_len every row has that length."""

    rows: tuple
    padding: int = 0
    q_len: int | None = None
    block: int = 8
    page: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    width: int = 192  # keys of the page table
    visibility: str = "block_causal"
    window: int | None = None
    scale: float | None = None
    tile: AttentionTile = SMALL
    multiprocessors: int = 132


@dataclasses.dataclass
class Batch:
    arguments: list[np.ndarray]
    keys: list[np.ndarray]  # per row, [kv_len, K, H]
    values: list[np.ndarray]


def make_batch(problem: Problem, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    pages_per_row = problem.width // problem.page
    num_pages = len(problem.rows) * pages_per_row + 2
    pool = np.full(
        (num_pages, 2, problem.kv_heads, problem.page, problem.head_dim), np.nan, np.float32
    )
    garbage = [-7, -1, 0, num_pages - 1, num_pages, 2**30]
    table = rng.choice(garbage, (len(problem.rows), pages_per_row)).astype(np.int32)
    free = list(rng.permutation(num_pages))
    contexts, kv_lens, sizes, keys, values = [], [], [], [], []
    for row, lengths in enumerate(problem.rows):
        context, inflight = lengths or (0, 0)
        kv_len = context + inflight
        shape = (2, kv_len, problem.kv_heads, problem.head_dim)
        k, v = np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32)
        for first in range(0, kv_len, problem.page):
            table[row, first // problem.page] = page = free.pop()
            count = min(problem.page, kv_len - first)
            pool[page, 0, :, :count] = k[first : first + count].transpose(1, 0, 2)
            pool[page, 1, :, :count] = v[first : first + count].transpose(1, 0, 2)
        contexts.append(context)
        kv_lens.append(kv_len)
        sizes.append(problem.q_len or inflight)
        keys.append(k)
        values.append(v)
    cu = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    q = np.full((cu[-1] + problem.padding, problem.heads, problem.head_dim), np.nan, np.float32)
    q[: cu[-1]] = jnp.asarray(rng.normal(size=(cu[-1], *q.shape[1:])), jnp.bfloat16)
    lengths = np.array(contexts, np.int32), np.array(kv_lens, np.int32)
    return Batch([q, pool, cu, *lengths, table], keys, values)


def run(problem: Problem, batch: Batch, monkeypatch) -> np.ndarray:
    few = dataclasses.replace(device.local_device(), num_multiprocessors=problem.multiprocessors)
    devices.pretend(monkeypatch, few)
    q, pool, *rest = batch.arguments
    out = kernel_interpreter.run(
        mosaic_gpu.extend_attention,
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(pool, jnp.bfloat16),
        *(jnp.asarray(array) for array in rest),
        visibility=problem.visibility,
        block_size=problem.block,
        scale=problem.scale or problem.head_dim**-0.5,
        q_len=problem.q_len,
        window=problem.window,
        tile=problem.tile,
    )
    return np.asarray(out, np.float32)


def oracle(problem: Problem, batch: Batch) -> np.ndarray:
    q, _, cu, contexts, kv_lens, _ = batch.arguments
    group = problem.heads // problem.kv_heads
    out = np.zeros(q.shape, np.float64)
    for row, kv_len in enumerate(kv_lens):
        for token in range(cu[row], cu[row + 1]):
            position = contexts[row] + token - cu[row]
            end = {
                "full": kv_len,
                "causal": min(kv_len, position + 1),
                "block_causal": min(kv_len, (position // problem.block + 1) * problem.block),
            }[problem.visibility]
            begin = 0
            if problem.window is not None:
                last = position if problem.visibility == "causal" else contexts[row]
                begin = max(0, last - problem.window + 1)
            for head in range(problem.heads if begin < end else 0):
                keys = batch.keys[row][begin:end, head // group].astype(np.float64)
                values = batch.values[row][begin:end, head // group]
                scores = keys @ q[token, head] * (problem.scale or problem.head_dim**-0.5)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values / weights.sum()
    return out
