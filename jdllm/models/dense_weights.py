"""The weight table of LLaDA and Dream: HF tensor names and shapes to parameters.

Both store q, k, v, gate and up apart; one parameter holds q, k and v, one gate and up,
as `layers` has them. The families differ in names alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jdllm.checkpoint.weight_table import WeightRow
from jdllm.models import decoder_config, table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """A family's module names; those after `layer` are relative to it."""

    embedding: str
    norm: str
    head: str
    layer: str  # with {layer}
    input_layernorm: str
    post_attention_layernorm: str
    qkv: tuple[str, str, str]
    attention_out: str
    gate_up: tuple[str, str]
    down: str


# LLaDA's head and MLP down projection share the leaf name ff_out.
LLADA = TensorNames(
    embedding="model.transformer.wte",
    norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layer="model.transformer.blocks.{layer}",
    input_layernorm="attn_norm",
    post_attention_layernorm="ff_norm",
    qkv=("q_proj", "k_proj", "v_proj"),
    attention_out="attn_out",
    gate_up=("ff_proj", "up_proj"),
    down="ff_out",
)
DREAM = TensorNames(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{layer}",
    input_layernorm="input_layernorm",
    post_attention_layernorm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)


def llada_rows(config: decoder_config.DenseConfig) -> tuple[WeightRow, ...]:
    """Returns every row of the table of a LLaDA of this size."""
    return tuple(_rows(config, LLADA))


def dream_rows(config: decoder_config.DenseConfig) -> tuple[WeightRow, ...]:
    """Returns every row of the table of a Dream of this size."""
    return tuple(_rows(config, DREAM))


def prepare(_: decoder_config.DenseConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters as the forward pass wants them: those of the checkpoint."""
    return dict(params)


def _rows(config: decoder_config.DenseConfig, names: TensorNames) -> Iterator[WeightRow]:
    yield from table.end_rows(config, embedding=names.embedding, norm=names.norm, head=names.head)
    for layer in range(config.spec.num_layers):
        yield from _attention_rows(config, names, layer)
        yield from _mlp_rows(config, names, layer)


def _attention_rows(
    config: decoder_config.DenseConfig, names: TensorNames, layer: int
) -> Iterator[WeightRow]:
    hf, ours, model = names.layer.format(layer=layer), f"layers.{layer}", config.spec
    dim, q_width = config.hidden_size, model.num_query_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    yield WeightRow(
        name=f"{hf}.{names.input_layernorm}.weight",
        shape=(dim,),
        target=f"{ours}.input_layernorm.weight",
    )
    starts, widths = (0, q_width, q_width + kv_width), (q_width, kv_width, kv_width)
    for name, start, width in zip(names.qkv, starts, widths, strict=True):
        yield WeightRow(
            name=f"{hf}.{name}.weight",
            shape=(width, dim),
            target=f"{ours}.attention.w_qkv",
            view=table.outputs(start, width),
        )
        if config.has_qkv_bias:
            yield WeightRow(
                name=f"{hf}.{name}.bias",
                shape=(width,),
                target=f"{ours}.attention.b_qkv",
                view=table.outputs(start, width),
            )
    yield WeightRow(
        name=f"{hf}.{names.attention_out}.weight",
        shape=(dim, q_width),
        target=f"{ours}.attention.w_out",
    )


def _mlp_rows(
    config: decoder_config.DenseConfig, names: TensorNames, layer: int
) -> Iterator[WeightRow]:
    hf, ours = names.layer.format(layer=layer), f"layers.{layer}"
    dim, width = config.hidden_size, config.intermediate_size
    yield WeightRow(
        name=f"{hf}.{names.post_attention_layernorm}.weight",
        shape=(dim,),
        target=f"{ours}.post_attention_layernorm.weight",
    )
    gate, up = names.gate_up
    yield from table.swiglu_rows(
        (f"{hf}.{gate}", f"{hf}.{up}"), f"{hf}.{names.down}", f"{ours}.mlp", dim=dim, width=width
    )
