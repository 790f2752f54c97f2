"""Which implementation of each op a model's compiled steps use, and why, for logs and info."""

from __future__ import annotations

from typing import Any

import pallas_kernels
from jdllm import spec as spec_lib


def describe(
    spec: spec_lib.ModelSpec, *, dtype: Any, page_size: int, implementation: str = "auto"
) -> dict[str, pallas_kernels.Choice]:
    """Returns each op's choice for one block of the model; raises as the op itself would.

    Dense matmuls of more tokens are XLA's where no kernel is known to beat it.
    """
    mask_id = spec.diffusion.mask_token_id
    choices = {
        "extend_attention": pallas_kernels.choose_extend_attention(
            implementation,
            dtype=dtype,
            head_dim=spec.head_dim,
            page_size=page_size,
            visibility=str(spec.diffusion.attention_pattern),
            block_size=spec.diffusion.block_size,
            tokens=spec.diffusion.block_size,
            rows=1,
            q_heads=spec.num_query_heads,
            kv_heads=spec.num_kv_heads,
        ),
        "unembed_stats": pallas_kernels.choose_unembed_stats(
            implementation,
            dtype=dtype,
            hidden_size=spec.hidden_size,
            forbidden_ids=() if mask_id is None else (mask_id,),
        ),
        "add_rms_norm": pallas_kernels.choose_add_rms_norm(
            implementation, dtype=dtype, width=spec.hidden_size
        ),
        "dense_matmul": pallas_kernels.choose_dense_matmul(
            implementation,
            dtype=dtype,
            tokens=spec.diffusion.block_size,
            columns=spec.hidden_size,
            contraction=spec.num_query_heads * spec.head_dim,
        ),
        "rotate_and_cache": pallas_kernels.choose_rotate_and_cache(
            implementation,
            dtype=dtype,
            pool_dtype=dtype,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary_dim,
        ),
        "read_cancel_flag": pallas_kernels.choose_read_cancel_flag(implementation),
    }
    if spec.moe is not None:
        choices["grouped_matmul"] = pallas_kernels.choose_grouped_matmul(
            implementation,
            dtype=dtype,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.moe.intermediate_size,
        )
        choices["top_k_routing"] = pallas_kernels.choose_top_k_routing(
            implementation,
            num_experts=spec.moe.num_experts,
            num_groups=spec.moe.num_groups,
            experts_per_token=spec.moe.experts_per_token,
        )
    return choices
