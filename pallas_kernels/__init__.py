"""Public ops of the kernel package; it imports jax only and knows nothing of the engine.

An op is one folder. Callers use its `api.py`. `reference.py` computes the op with XLA, `checks.py`
rejects wrong arguments, and the other files are its kernels. `tiles/` holds the tuned parameters of
the kernels, one file per device. `dispatch.py` lists the ops and the implementations of each.
"""

from pallas_kernels.add_rms_norm.api import add_rms_norm
from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.all_reduce.api import all_reduce, all_reduce_add_rms_norm
from pallas_kernels.dense_matmul.api import dense_matmul, swiglu_matmul
from pallas_kernels.dispatch import Choice, Choices, describe_choices, record_choices
from pallas_kernels.exchange_words.api import exchange_words
from pallas_kernels.extend_attention.api import extend_attention
from pallas_kernels.extend_attention.reference import AttentionTiling
from pallas_kernels.fp8_matmul.api import fp8_matmul, quantize_rows
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.gate_up import gate_up_group, interleave_gate_up, split_gate_up
from pallas_kernels.grouped_matmul.reference import ACTIVATIONS, Activation, swiglu
from pallas_kernels.padded_attention.api import masked_attention, padded_attention
from pallas_kernels.peers import CHUNK_WORDS, Peers, buffer_words
from pallas_kernels.read_cancel_flag.api import choose as choose_read_cancel_flag
from pallas_kernels.read_cancel_flag.api import read_cancel_flag
from pallas_kernels.rotate_and_cache.api import rotate_and_cache
from pallas_kernels.rotate_and_cache.reference import apply_rope, rotated_heads
from pallas_kernels.top_k_routing.api import top_k_routing
from pallas_kernels.unembed_stats.api import (
    UnembedStats,
    logits_stats,
    penalize,
    probability,
    unembed_stats,
)

__all__ = [
    "ACTIVATIONS",
    "CHUNK_WORDS",
    "Activation",
    "AttentionTiling",
    "Choice",
    "Choices",
    "Peers",
    "UnembedStats",
    "add_rms_norm",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "apply_rope",
    "buffer_words",
    "choose_read_cancel_flag",
    "dense_matmul",
    "describe_choices",
    "exchange_words",
    "extend_attention",
    "fp8_matmul",
    "gate_up_group",
    "grouped_matmul",
    "interleave_gate_up",
    "logits_stats",
    "masked_attention",
    "padded_attention",
    "penalize",
    "probability",
    "quantize_rows",
    "read_cancel_flag",
    "record_choices",
    "rms_norm",
    "rotate_and_cache",
    "rotated_heads",
    "split_gate_up",
    "swiglu",
    "swiglu_matmul",
    "top_k_routing",
    "unembed_stats",
]
