"""The two forwards of rows that denoise random tokens: of context, and of one canvas of each row.

`encode_step` writes K,V of context tokens. A row's tokens are padded to whole tiles of queries,
which attention works on; padding writes nothing. `forward_canvases` is the forward of a denoising
step. A canvas writes its K,V behind the context, where each step and later the encoder overwrite
them; the prefix cache never sees them.

Letters: R rows, L positions of a canvas, T packed tokens, M pages of the longest row.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jdllm.layers import attention
from jdllm.models import gemma_decoder, loading
from jdllm.runner import packed, paging
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import program
from jdllm.scheduler.rows import uniform
from jdllm.spec import AttentionPattern


def model_of(graphdef: nnx.GraphDef, params: program.Params) -> gemma_decoder.GemmaDecoder:
    """Returns the module of a family of this kind."""
    model = loading.merge(graphdef, params)
    assert isinstance(model, gemma_decoder.GemmaDecoder), "the only family of this kind"
    return model


def encode_step(
    graphdef: nnx.GraphDef,
    config: StepConfig,
    params: program.Params,
    memory: program.Memory,
    inputs: packed.PackedInputs,
) -> tuple[program.Memory, Int32[Array, ""]]:
    """Returns the pool with K,V of the packed tokens written, and the number of tokens."""
    batch, positions, is_valid = packed.paged_batch(config, inputs)
    attend = attention.paged_attend(
        batch,
        visibility=AttentionPattern.CAUSAL,
        block_size=uniform.tile_of(config.block_size),
        implementation=config.implementation,
    )
    _, pools = model_of(graphdef, params)(
        inputs.tokens, positions, attend=attend, caches=memory["pools"], valid=is_valid
    )
    return {"pools": pools}, jnp.sum(is_valid, dtype=jnp.int32)


def forward_canvases(
    config: StepConfig,
    model: gemma_decoder.GemmaDecoder,
    pools: list[Array],
    canvas: Int32[Array, "R L"],
    expected: Float[Array, "R L D"],
    context_lens: Int32[Array, " R"],
    is_active: Bool[Array, " R"],
    page_table: Int32[Array, "R M"],
) -> tuple[Float[Array, "R L D"], list[Array]]:
    """Returns the hidden states of one canvas of each row, and the pool; others write nothing."""
    R, L = canvas.shape
    positions = context_lens[:, None] + jnp.arange(L, dtype=jnp.int32)  # [R, L]
    rows = jnp.repeat(jnp.arange(R, dtype=jnp.int32), L)
    is_valid = jnp.repeat(is_active, L)
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(R + 1, dtype=jnp.int32) * L,
        context_lens=context_lens,
        kv_lens=jnp.where(is_active, context_lens + L, 0),
        page_table=page_table,
        kv_indices=paging.kv_indices(config, page_table, rows, positions.reshape(-1), is_valid),
    )
    attend = attention.paged_attend(
        batch,
        visibility=AttentionPattern.FULL,
        block_size=L,
        q_len=L,
        implementation=config.implementation,
    )
    hidden, written = model.denoise(
        canvas.reshape(-1),
        expected.reshape(R * L, -1),
        positions.reshape(-1),
        attend=attend,
        caches=pools,
        valid=is_valid,
    )
    return hidden.reshape(R, L, -1), cast(list[Array], written)
