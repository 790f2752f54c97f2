"""Configs of decoder models as frozen dataclasses, independent of how a config.json spells them."""

from __future__ import annotations

import dataclasses

from jdllm import spec as spec_lib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the stack of layers and the two ends of every decoder need."""

    spec: spec_lib.ModelSpec
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool

    @property
    def hidden_size(self) -> int:
        """Returns the width of the residual stream."""
        return self.spec.hidden_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(DecoderConfig):
    """A decoder whose layers are all dense, without norms of q and k (LLaDA, Dream)."""

    intermediate_size: int
    has_qkv_bias: bool
