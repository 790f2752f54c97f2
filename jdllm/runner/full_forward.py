"""Whole-sequence logits and scores of a checkpoint, without engine, pages or sampling.

For parity checks and notebooks: `load_model(path).logits(ids)`. It needs memory for the full
`[B, S, V]` float32 result, which serving never builds. `token_scores` needs none of that.

Letters: those of the whole project, and P places to score in each row.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32
from numpy.typing import ArrayLike

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.layers import attention
from jdllm.models import decoder, loading
from jdllm.spec import ModelSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a model says about single positions; natural logarithms of softmax probabilities.

    No id is left out of the softmax, nor of the best: the mask id is a token as any other.
    """

    logprob: Float32[Array, "B P"]  # of the given token
    best_id: Int32[Array, "B P"]
    best_logprob: Float32[Array, "B P"]


class FullModel:
    """A loaded model whose `logits` sees whole sequences under the family's attention."""

    def __init__(self, model: loading.LoadedModel):
        """Raises a ConfigError for a family whose logits need a context and a canvas apart."""
        if model.spec.diffusion.kind == "uniform":
            raise errors.ConfigError(
                f"{model.spec.architecture} has no logits of a whole sequence: a context is "
                "encoded, and a canvas denoised behind it; serve it instead"
            )
        self.model = model
        # A closure, not a static argument: each call would hash the graph.
        self._forward = jax.jit(functools.partial(_logits, model.graphdef, model.spec))
        self._scores = jax.jit(functools.partial(_token_scores, model.graphdef, model.spec))

    @property
    def spec(self) -> ModelSpec:
        """Returns what the engine knows about the model."""
        return self.model.spec

    def logits(self, ids: ArrayLike) -> Float32[Array, "B S V"]:
        """Returns the logits of token ids [B, S], unshifted."""
        return self._forward(self.model.params, self._checked(ids))

    def token_scores(
        self,
        ids: ArrayLike,
        lengths: Int[np.ndarray, " B"],
        positions: Int[np.ndarray, "B P"],
        tokens: Int[np.ndarray, "B P"],
    ) -> TokenScores:
        """Scores `tokens` at `positions` of the rows `ids` [B, S].

        Tokens from `lengths` on are padding, which no other token sees. A model with shifted logits
        cannot score position 0, nor can one whose context is causal. Every new shape (B, S, P)
        compiles a program.
        """
        checked = self._checked(ids)
        first = 1 if self.spec.diffusion.is_shifted or self.spec.diffusion.is_causal else 0
        if positions.min() < first or (positions >= lengths[:, None]).any():
            raise ValueError(f"positions must lie in [{first}, length of the row)")
        places = positions.astype(np.int32) - first
        return self._scores(
            self.model.params, checked, lengths.astype(np.int32), places, tokens.astype(np.int32)
        )

    def _checked(self, ids: ArrayLike) -> Int32[np.ndarray, "B S"]:
        array = np.asarray(ids)
        if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"ids must be a non-empty integer array [batch, length], got shape "
                f"{array.shape} of {array.dtype}"
            )
        low, high = array.min(), array.max()
        if low < 0 or high >= self.spec.vocab_size:
            raise ValueError(
                f"ids must lie in [0, {self.spec.vocab_size}), got values from {low} to {high}"
            )
        if array.shape[1] > self.spec.max_position_embeddings:
            raise ValueError(
                f"sequences of {array.shape[1]} tokens exceed the model's "
                f"max_position_embeddings={self.spec.max_position_embeddings}"
            )
        return array.astype(np.int32)


def load_model(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    block_size: int | None = None,
    load_format: str = "auto",
) -> FullModel:
    """Returns the model of a directory or a name (`source.resolve_text`); None means jdllm-nano."""
    directory = source.resolve_text(path)
    return FullModel(
        loading.load(directory, dtype=dtype, block_size=block_size, load_format=load_format)
    )


def _logits(
    graphdef: nnx.GraphDef,
    model_spec: ModelSpec,
    params: loading.Params,
    ids: Int[Array, "B S"],
) -> Float[Array, "B S V"]:
    batch, length = ids.shape
    model = loading.merge(graphdef, params)
    is_text = jnp.ones((batch, length), bool)
    hidden = _hidden(model, model_spec, ids, is_text)
    return model.logits(hidden).reshape(batch, length, -1)


def _token_scores(
    graphdef: nnx.GraphDef,
    model_spec: ModelSpec,
    params: loading.Params,
    ids: Int[Array, "B S"],
    lengths: Int32[Array, " B"],
    places: Int32[Array, "B P"],
    tokens: Int32[Array, "B P"],
) -> TokenScores:
    """`places` are the rows of logits that predict `tokens`."""
    is_text = jnp.arange(ids.shape[1]) < lengths[:, None]  # [B, S]
    model = loading.merge(graphdef, params)
    hidden = _hidden(model, model_spec, ids, is_text)
    chosen = jnp.take_along_axis(
        hidden.reshape(*ids.shape, -1), places[:, :, None], axis=1
    )  # [B, P, D]
    stats = model.unembedding().stats(
        chosen.reshape(-1, chosen.shape[-1]), given_ids=tokens.reshape(-1)
    )
    return TokenScores(
        logprob=(stats.given_logit - stats.logsumexp).reshape(places.shape),
        best_id=stats.best_id.reshape(places.shape),
        best_logprob=(stats.best_logit - stats.logsumexp).reshape(places.shape),
    )


def _hidden(
    model: decoder.Decoder,
    model_spec: ModelSpec,
    ids: Int[Array, "B S"],
    is_text: Bool[Array, "B S"],
) -> Float[Array, "T D"]:
    """Returns the hidden states of all rows in one list; T = B * S.

    No token sees the padding, where `is_text` is false. Rows are padded further to whole blocks,
    because a router may choose experts for a block.
    """
    diffusion, (batch, length) = model_spec.diffusion, ids.shape
    missing = -length % diffusion.block_size
    ids, is_text = (jnp.pad(one, ((0, 0), (0, missing))) for one in (ids, is_text))
    whole = length + missing
    mask = attention.visibility_mask(whole, diffusion.block_size, diffusion.attention_pattern)
    # Padding sees itself, since every query must see a key.
    seen = mask & is_text[:, None] | np.eye(whole, dtype=bool)
    hidden, _ = model(
        ids.reshape(-1),
        jnp.tile(jnp.arange(whole, dtype=jnp.int32), batch),
        attend=attention.dense_attend(seen, batch),
        caches=[None] * model_spec.num_layers,
        valid=is_text.reshape(-1),
    )
    return hidden.reshape(batch, whole, -1)[:, :length].reshape(batch * length, -1)
