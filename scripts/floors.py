"""Floors for the benchmarks in this folder: the least time of each op by its bytes and FLOPs.

The rates were measured on one NVIDIA H200; they are not those of its data sheet: a device copy
moves 4.3 TB/s (read plus written), a bf16 matmul of 8192^3 runs at 790 TFLOP/s. An H100 (80 GB,
SXM) copies 3.0 TB/s and multiplies as fast; `measured_on` changes to the rates of another GPU. An
op's floor is the larger of its two times; a forward's floor is the sum over its ops, since they run
one after another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jdllm.layers import moe

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
BYTES_PER_S_OF = {"H200": 4.3e12, "H100": 3.0e12}  # by a part of the name that JAX gives the GPU
LINK_BYTES_PER_S = 450e9  # NVLink of both, in one direction, by their data sheets
BF16_BYTES = 2


def measured_on(device_kind: str) -> None:
    """Takes the rates of this GPU from now on; those of an H200 if the kind is not known."""
    global BYTES_PER_S
    found = [rate for name, rate in BYTES_PER_S_OF.items() if name in device_kind]
    BYTES_PER_S = found[0] if found else BYTES_PER_S_OF["H200"]


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

    `config` is a DecoderConfig. Rows have `context` cached and `new_tokens` in-flight tokens; a
    step of a model without a mask token is that of a canvas, whose tokens see one another, with its
    self-conditioning. Without `head` (prefill), nothing after the last layer's K and V is needed,
    so only the K,V projection of that layer counts.
    """
    model, T = config.spec, rows * new_tokens
    D = model.hidden_size
    layers = config.layers if head else config.layers[:-1]
    besides = 0 if config.dense is None else 3 * D * config.dense.width
    is_canvas = head and model.diffusion.kind == "uniform"
    linear = len(layers) * besides + (besides if is_canvas else 0)
    attended, routed, router = Work(bytes=0, flops=0), Work(bytes=0, flops=0), 0
    for layer in layers:
        heads, forward = layer.attention, layer.feed_forward
        begin, end = _visible(model, heads.window, context + np.arange(new_tokens), context, head)
        pairs, keys = int(np.sum(end - begin)), int(np.max(end) - np.min(begin))  # of a row
        attended += attention(
            scores=rows * pairs, kv_tokens=rows * keys,
            query_heads=heads.num_query_heads, kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
        )  # fmt: skip
        q_width = heads.num_query_heads * heads.head_dim
        linear += D * (2 * q_width + _kv_width(heads))
        if not isinstance(forward, moe.MoEConfig):
            linear += 3 * D * forward.width
            continue
        E, k = forward.router.num_experts, forward.router.experts_per_token
        routed += experts(
            T, hit=distinct_experts(T, E, k), experts_per_token=k,
            expert_params=3 * D * forward.width,
        )  # fmt: skip
        linear += 3 * D * forward.shared_width
        router += D * E
    work = {"attention": attended, "dense": matmul(T, linear)}
    if router:
        work["moe"] = routed
        work["dense"] += Work(bytes=router * 4, flops=2 * T * router)
    if head:
        work["head"] = matmul(T, model.vocab_size * D)
    else:
        work["dense"] += matmul(T, D * _kv_width(config.layers[-1].attention))
    if is_canvas:
        work["mixture"] = matmul(T, model.vocab_size * D)
    return work


def _kv_width(heads: Any) -> int:
    """Returns the outputs of a layer's projections of k and v."""
    return (1 if heads.shares_kv else 2) * heads.num_kv_heads * heads.head_dim


def _visible(
    model: Any, window: int | None, position: np.ndarray, context: int, head: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first key that each query sees, and the end of its keys."""
    size, last = model.diffusion.block_size, position
    if model.diffusion.kind != "uniform":
        end = (position // size + 1) * size
    elif head:  # a canvas, whose tokens have one window
        end, last = np.full_like(position, context + len(position)), np.full_like(position, context)
    else:
        end = position + 1
    begin = np.zeros_like(position) if window is None else np.maximum(last - window + 1, 0)
    return begin, end


def total_floor_ms(work: dict[str, Work]) -> float:
    """Returns the sum of the ops' own floors."""
    return sum(part.floor_ms for part in work.values())
