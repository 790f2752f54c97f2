"""Public ops of the kernel package; it imports jax only and knows nothing of the engine."""

from pallas_kernels.dispatch import describe
from pallas_kernels.extend_attention import AttentionTiling, extend_attention
from pallas_kernels.grouped_matmul import (
    gate_up_group,
    grouped_matmul,
    interleave_gate_up,
    split_gate_up,
)
from pallas_kernels.unembed_stats import UnembedStats, penalize, probability, unembed_stats

__all__ = [
    "AttentionTiling",
    "UnembedStats",
    "describe",
    "extend_attention",
    "gate_up_group",
    "grouped_matmul",
    "interleave_gate_up",
    "penalize",
    "probability",
    "split_gate_up",
    "unembed_stats",
]
