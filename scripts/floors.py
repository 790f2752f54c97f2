"""Floors for the benchmarks in this folder: the least time of each op by its bytes and FLOPs.

The rates were measured on one NVIDIA H200; they are not those of its data sheet: a device copy
moves 4.3 TB/s (read plus written), a bf16 matmul of 8192^3 runs at 790 TFLOP/s. An op's floor is
the larger of its two times; a forward's floor is the sum over its ops, since they run one after
another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jdllm.layers import moe

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
BF16_BYTES = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The bytes that an op must read or write, and the FLOPs that it must compute."""

    bytes: float
    flops: float

    @property
    def floor_ms(self) -> float:
        """The larger of the two times, in milliseconds."""
        return max(self.bytes / BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e3

    def __add__(self, other: Work) -> Work:
        return Work(bytes=self.bytes + other.bytes, flops=self.flops + other.flops)


def distinct_experts(tokens: int, num_experts: int, experts_per_token: int) -> float:
    """Returns how many experts `tokens` use on average under uniform independent routing."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)


def matmul(tokens: int, params: float) -> Work:
    """Returns the work of `tokens` rows times `params` weights."""
    return Work(bytes=params * BF16_BYTES, flops=2 * tokens * params)


def experts(tokens: int, *, hit: float, experts_per_token: int, expert_params: float) -> Work:
    """Returns the work of the routed experts of one layer; `hit` of them are read."""
    return Work(
        bytes=hit * expert_params * BF16_BYTES,
        flops=2 * tokens * experts_per_token * expert_params,
    )


def attention(
    *, scores: float, kv_tokens: float, query_heads: int, kv_heads: int, head_dim: int
) -> Work:
    """Returns the work of one layer; `scores` counts a head's visible (query, key) pairs."""
    return Work(
        bytes=2 * kv_tokens * kv_heads * head_dim * BF16_BYTES,
        flops=4 * scores * query_heads * head_dim,
    )


def forward(
    config: Any, *, rows: int, new_tokens: int, context: int, head: bool
) -> dict[str, Work]:
    """Returns the work of a whole forward for each op, summed over its layers.

    `config` is a DecoderConfig. Rows have `context` cached and `new_tokens` in-flight tokens, with
    block-causal visibility. Without `head` (prefill), nothing after the last layer's K and V is
    needed, so only the K,V projection of that layer counts.
    """
    model, T = config.spec, rows * new_tokens
    D, H = model.hidden_size, model.head_dim
    q_width, kv_width = model.num_query_heads * H, model.num_kv_heads * H
    layers = model.num_layers if head else model.num_layers - 1
    blocks = new_tokens // model.diffusion.block_size
    seen = context + (blocks + 1) / 2 * model.diffusion.block_size  # keys a query sees on average
    feed_forwards = [layer.feed_forward for layer in config.layers[:layers]]
    routed = [one for one in feed_forwards if isinstance(one, moe.MoEConfig)]
    linear = layers * (D * (q_width + 2 * kv_width) + q_width * D)
    linear += sum(3 * D * one.width for one in feed_forwards if one not in routed)
    linear += sum(3 * D * one.shared_width for one in routed)
    work = {
        "attention": _times(
            layers,
            attention(
                scores=T * seen, kv_tokens=rows * (context + new_tokens),
                query_heads=model.num_query_heads, kv_heads=model.num_kv_heads, head_dim=H,
            ),
        ),
        "dense": matmul(T, linear),
    }  # fmt: skip
    if routed:
        E, k = model.moe.num_experts, model.moe.experts_per_token
        expert_params = 3 * D * model.moe.intermediate_size
        hit = distinct_experts(T, E, k)
        one = experts(T, hit=hit, experts_per_token=k, expert_params=expert_params)
        router = Work(bytes=D * E * 4, flops=2 * T * D * E)
        work["moe"] = _times(len(routed), one)
        work["dense"] += _times(len(routed), router)
    if head:
        work["head"] = matmul(T, model.vocab_size * D)
    else:
        work["dense"] += matmul(T, 2 * kv_width * D)
    return work


def total_floor_ms(work: dict[str, Work]) -> float:
    """Returns the sum of the ops' own floors."""
    return sum(part.floor_ms for part in work.values())


def _times(count: float, work: Work) -> Work:
    return Work(bytes=count * work.bytes, flops=count * work.flops)
