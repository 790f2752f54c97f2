"""LLaDA2's weight table: HF tensor names and shapes to parameters.

Experts come in three forms: split per expert (published checkpoints), merged over
experts (dFactory), and pre-fused gate and up (dInfer). Their parameter interleaves
gate and up rows in groups, the layout of `pallas_kernels.grouped_matmul`; so does the
shared expert's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import pallas_kernels
from jdllm.checkpoint.weight_table import WeightRow, transposed
from jdllm.models import table
from jdllm.models.families import llada2
from jdllm.models.table import View

_GATE, _UP = 0, 1
_NORM_HEAD_EPS = 1e-7


def weight_rows(config: llada2.LLaDA2Config) -> tuple[WeightRow, ...]:
    """Returns every row of the table for a model of this size."""
    rows = list(
        table.end_rows(config, embedding="model.word_embeddings", norm="model.norm", head="lm_head")
    )
    for layer in range(config.spec.num_layers):
        rows += _attention_rows(config, layer)
        rows += (
            _moe_rows(config, layer) if config.is_moe_layer(layer) else _dense_rows(config, layer)
        )
    return tuple(rows)


def prepare(config: llada2.LLaDA2Config, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters as the forward pass wants them, from those of the checkpoint.

    `norm_head` models store an LM head that is to be L2-normalised along the vocabulary.
    """
    if not config.norm_head:
        return dict(params)
    head = params["lm_head"].astype(np.float32)
    length = (head * head).sum(axis=0, keepdims=True) ** 0.5
    unit = head / length.clip(_NORM_HEAD_EPS)
    return {**params, "lm_head": unit.astype(params["lm_head"].dtype)}


def _attention_rows(config: llada2.LLaDA2Config, layer: int) -> Iterator[WeightRow]:
    hf, ours, model = f"model.layers.{layer}", f"layers.{layer}", config.spec
    dim, q_width = config.hidden_size, model.num_query_heads * model.head_dim
    qkv_width = q_width + 2 * model.num_kv_heads * model.head_dim
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield WeightRow(name=f"{hf}.{name}.weight", shape=(dim,), target=f"{ours}.{name}.weight")
    for name in ("query_layernorm", "key_layernorm"):
        yield WeightRow(
            name=f"{hf}.attention.{name}.weight",
            shape=(model.head_dim,),
            target=f"{ours}.attention.{name}.weight",
        )
    yield WeightRow(
        name=f"{hf}.attention.query_key_value.weight",
        shape=(qkv_width, dim),
        target=f"{ours}.attention.w_qkv",
    )
    yield WeightRow(
        name=f"{hf}.attention.dense.weight",
        shape=(dim, q_width),
        target=f"{ours}.attention.w_out",
    )


def _dense_rows(config: llada2.LLaDA2Config, layer: int) -> Iterator[WeightRow]:
    return table.swiglu_rows(
        *_swiglu_names(f"model.layers.{layer}.mlp"),
        f"layers.{layer}.mlp",
        dim=config.hidden_size,
        width=config.intermediate_size,
    )


def _swiglu_names(hf: str) -> tuple[tuple[str, str], str]:
    return (f"{hf}.gate_proj", f"{hf}.up_proj"), f"{hf}.down_proj"


def _moe_rows(config: llada2.LLaDA2Config, layer: int) -> Iterator[WeightRow]:
    hf, ours = f"model.layers.{layer}.mlp", f"layers.{layer}.mlp"
    dim, experts = config.hidden_size, config.num_experts
    yield WeightRow(
        name=f"{hf}.gate.weight",
        shape=(experts, dim),
        target=f"{ours}.router.weight",
        view=transposed,
    )
    yield WeightRow(
        name=f"{hf}.gate.expert_bias", shape=(experts,), target=f"{ours}.router.expert_bias"
    )
    if config.shared_intermediate_size:
        yield from table.swiglu_rows(
            *_swiglu_names(f"{hf}.shared_experts"),
            f"{ours}.shared_experts",
            dim=dim,
            width=config.shared_intermediate_size,
            gate_up_view=_shared_part,
        )
    yield from _expert_rows(
        hf, f"{ours}.experts", dim=dim, width=config.moe_intermediate_size, experts=experts
    )


def _expert_rows(hf: str, ours: str, *, dim: int, width: int, experts: int) -> Iterator[WeightRow]:
    gate_up, down = f"{ours}.w_gate_up", f"{ours}.w_down"
    parts = ((_GATE, "gate_proj"), (_UP, "up_proj"))
    for e in range(experts):
        for part, name in parts:
            yield WeightRow(
                name=f"{hf}.experts.{e}.{name}.weight",
                shape=(width, dim),
                target=gate_up,
                view=_expert_part(e, part, width),
                form="split",
            )
        yield WeightRow(
            name=f"{hf}.experts.{e}.down_proj.weight",
            shape=(dim, width),
            target=down,
            view=_expert(e),
            form="split",
        )
    for part, name in parts:
        yield WeightRow(
            name=f"{hf}.experts.{name}",
            shape=(experts, width, dim),
            target=gate_up,
            view=_expert_part(slice(None), part, width),
            form="merged",
        )
    for name, form in ((f"{hf}.experts.down_proj", "merged"), (f"{hf}.w2", "fused")):
        yield WeightRow(name=name, shape=(experts, dim, width), target=down, form=form)
    yield WeightRow(
        name=f"{hf}.w1",
        shape=(experts, 2 * width, dim),
        target=gate_up,
        view=lambda array: np.swapaxes(_grouped(array, width), 1, 2),
        form="fused",
    )


def _expert(e: int) -> View:
    return lambda array: array[e]


def _expert_part(e: int | slice, part: int, width: int) -> View:
    return lambda array: _grouped(array, width)[e, ..., part, :, :]


def _shared_part(part: int, width: int) -> View:
    return lambda array: _grouped(array[None], width)[0, :, part]


def _grouped(array: np.ndarray, width: int) -> np.ndarray:
    # [E, 2I, D] -> [E, groups, gate or up, rows of a group, D], without a copy.
    group = pallas_kernels.gate_up_group(width)
    return array.reshape(array.shape[0], width // group, 2, group, array.shape[-1])
