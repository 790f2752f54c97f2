"""What a family consists of; the declaration of a family checks that it is complete.

The check parses a tiny config of the family and compares its weight table with the parameters of
that model (only their shapes, without memory). So a piece that is missing, or that does not fit
the others, fails the import and not a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdllm.checkpoint import weight_table
from jdllm.models import decoder, decoder_config, draft_adapter, hf_config, key_rules, table
from jdllm.spec import DiffusionSpec

# The tiny model's vocabulary holds the special tokens of every published tokenizer.
_TINY_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_TINY = {"vocab_size": 1 << 18, "rms_norm_eps": 1e-6, "rope_theta": 1e4}

AnyArray = Any  # a jax or a numpy array, and what comes back is of the same kind


def as_stored(_: Any, __: str, array: AnyArray) -> AnyArray:
    """Returns a parameter as it is, for families that need no `prepare`."""
    return array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family; `defaults` holds the facts that a config.json may leave out.

    `read` parses a config.json that passed `rules`. `prepare` (config, path, array) is the last
    step of loading a parameter of a checkpoint, on the device or on the host. `end_of_turn` is the
    token that ends a turn in the family's chats, or None if only the end of the text does.
    `flatten` brings the keys of a nested config.json (a model of text and images) to its top level.
    `example` is the config.json, without sizes, of a model that has every parameter that a model of
    this family may have. `draft_adapter` says where a checkpoint may have an adapter for drafts.
    """

    rules: key_rules.KeyRules
    defaults: DiffusionSpec
    read: Callable[[Mapping[str, Any], DiffusionSpec], decoder_config.DecoderConfig]
    weights: table.WeightTable
    end_of_turn: str | None
    example: Mapping[str, Any]
    build: Callable[..., decoder.Decoder] = decoder.Decoder
    prepare: Callable[[Any, str, AnyArray], AnyArray] = as_stored
    flatten: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    draft_adapter: draft_adapter.DraftAdapter | None = None

    def __post_init__(self) -> None:
        try:
            if self.end_of_turn == "":
                raise ValueError("end_of_turn names a token, or is None")
            config = self.parse_config(self._tiny())
            if len(config.layers) != config.spec.num_layers:
                raise ValueError(
                    f"read gives {len(config.layers)} of {config.spec.num_layers} layers"
                )
            self.weights.check(config, self.shapes(config))
        except ValueError as error:
            raise ValueError(f"{self.rules.architecture} is no complete family: {error}") from error

    def parse_config(
        self,
        hf: Mapping[str, Any],
        *,
        block_size: int | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> decoder_config.DecoderConfig:
        """Returns the parsed `config.json`; `block_size` overrides the model's own."""
        hf = {**self.rules.missing, **self.flatten(hf)}
        self.rules.check(hf)
        diffusion = hf_config.diffusion(hf, generation_config, block_size, self.defaults)
        config = self.read(hf, diffusion)
        hf_config.check_spec(config.spec, self.rules.sizes)
        return config

    def abstract(
        self, config: decoder_config.DecoderConfig, *, dtype: jnp.dtype, **build_options: Any
    ) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
        """Returns (graphdef, shape and dtype of every parameter) without allocating memory.

        `build_options`: implementation, hash_embedding_positions.
        """
        module = nnx.eval_shape(lambda: self.build(config, dtype=dtype, **build_options))
        graphdef, state = nnx.split(module)
        return graphdef, {
            ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in nnx.to_flat_state(state)
        }

    def weight_rows(
        self, config: decoder_config.DecoderConfig
    ) -> tuple[weight_table.WeightRow, ...]:
        """Returns a row for every tensor that a checkpoint of this model may hold."""
        return self.weights.expand(config, self.shapes(config))

    def shapes(self, config: decoder_config.DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape of every parameter of a model; the dtypes have no meaning."""
        return self.abstract(config, dtype=jnp.dtype(jnp.float32))[1]

    def _tiny(self) -> dict[str, Any]:
        sizes = {getattr(self.rules.sizes, size): value for size, value in _TINY_SIZES.items()}
        return {**_TINY, **sizes, **self.example}
