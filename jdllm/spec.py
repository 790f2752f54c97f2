"""What the rest of the engine needs to know about a model, without jax.

A family turns an HF config.json into a `ModelSpec`; host code (scheduler, KV
sizing, validation) and device code (steps) read nothing else about the model.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal


class AttentionPattern(enum.StrEnum):
    """Which committed positions a query sees; with FULL, no prefix of them has exact K,V."""

    BLOCK_CAUSAL = "block_causal"
    FULL = "full"
    CAUSAL = "causal"


class LogitAlignment(enum.StrEnum):
    """Whether logit row i predicts position i, or position i + 1 (AR style)."""

    SAME_POSITION = "same_position"
    SHIFTED = "shifted"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EditTokens:
    """The tokens by which a model says that a position goes, or that a mask comes before it."""

    delete: int
    split: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSpec:
    """How a family denoises: block length in tokens, special ids, visibility.

    `end_of_text_id` is the token that fills the model's training rows after the end of the text.
    It ends an output, but other tokens end one too (the end of a turn). `default_algorithm` is the
    one that the model was trained for, where that is not the default of its kind.
    """

    block_size: int
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    end_of_text_id: int | None = None  # every parsed config has one
    attention_pattern: AttentionPattern = AttentionPattern.BLOCK_CAUSAL
    logit_alignment: LogitAlignment = LogitAlignment.SAME_POSITION
    edit_tokens: EditTokens | None = None
    default_algorithm: str | None = None

    @property
    def kind(self) -> Literal["block", "canvas", "uniform"] | None:
        """The kind of rows that serves the family; None if no kind does.

        A family without a mask token begins with noise: a canvas of uniformly random tokens behind
        a context that is encoded causally.
        """
        if self.mask_token_id is None:
            return "uniform" if self.attention_pattern is AttentionPattern.CAUSAL else None
        return "canvas" if self.attention_pattern is AttentionPattern.FULL else "block"

    @property
    def is_causal(self) -> bool:
        """Whether K,V of written blocks are those of a causal forward.

        Blocks are then counted from the prompt's end. The positions of a block see each other only
        while it is denoised. Row i of a causal forward's logits predicts position i + 1.
        """
        return self.kind == "block" and self.attention_pattern is AttentionPattern.CAUSAL

    @property
    def is_shifted(self) -> bool:
        """Whether the prediction of a position comes from the logit row before it."""
        return self.logit_alignment is LogitAlignment.SHIFTED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Sizes of the routed experts; `num_groups` 1 means no group limit."""

    num_experts: int
    experts_per_token: int
    num_groups: int
    intermediate_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVHeads:
    """How many heads of K (and of V) a layer has, and their width."""

    count: int
    dim: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and decoding facts of one loaded model."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    diffusion: DiffusionSpec
    rotary_dim: int
    moe: MoESpec | None = None  # None if no layer has experts
    kv_heads_of_layers: tuple[KVHeads, ...] = ()  # where layers differ from the numbers above

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        """KV heads of each layer."""
        same = KVHeads(count=self.num_kv_heads, dim=self.head_dim)
        return self.kv_heads_of_layers or (same,) * self.num_layers

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns bytes of K and V over all layers for one token."""
        return 2 * sum(heads.count * heads.dim for heads in self.kv_heads) * itemsize
