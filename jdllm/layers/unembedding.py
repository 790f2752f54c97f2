"""The LM head, whole or split over ranks by rows of the vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

import pallas_kernels
from jdllm.device import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LMHead:
    """`weight` has the rows of one rank; the rank r holds the ids from r * V / num_ranks on.

    Results are those of the whole vocabulary, with the same bits on every rank. With a `softcap` c,
    a logit z is c * tanh(z / c).
    """

    weight: Float[Array, "V/num_ranks D"]
    num_ranks: int = dataclasses.field(default=1, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def vocab_size(self) -> int:
        """Rows of the whole head."""
        return self.weight.shape[0] * self.num_ranks

    def local_logits(self, x: Float[Array, "T D"]) -> Float32[Array, "T V/num_ranks"]:
        """Returns the logits of this rank's ids."""
        return self._logits(x, self.weight)

    def logits(self, x: Float[Array, "T D"]) -> Float32[Array, "T V"]:
        """Returns the logits of the whole vocabulary."""
        logits = self.local_logits(x)
        if self.num_ranks == 1:
            return logits
        parts = sharding.of_all_ranks(logits)
        return jnp.moveaxis(parts, 0, 1).reshape(logits.shape[0], -1)

    def logits_of(self, x: Float[Array, "T D"], ids: tuple[int, ...]) -> Float32[Array, "T X"]:
        """Returns the logits of the tokens `ids` only."""
        part = self.weight.shape[0]
        rank = sharding.rank() if self.num_ranks > 1 else 0
        places = jnp.array(ids, jnp.int32) - rank * part  # of tokens of other ranks: out of bounds
        rows = self.weight[jnp.clip(places, 0, part - 1)]
        logits = self._logits(x, rows)
        if self.num_ranks == 1:
            return logits
        ranks = sharding.of_all_ranks(logits)
        return jnp.stack([ranks[token // part, :, i] for i, token in enumerate(ids)], axis=1)

    def _logits(self, x: Float[Array, "T D"], rows: Float[Array, "X D"]) -> Float32[Array, "T X"]:
        logits = jnp.einsum("TD,XD->TX", x, rows, preferred_element_type=jnp.float32)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def stats(
        self,
        x: Float[Array, "T D"],
        *,
        forbidden_ids: tuple[int, ...] = (),
        given_ids: Int32[Array, " T"] | None = None,
        draw_keys: UInt32[Array, "T 2"] | None = None,
        temperature: Float32[Array, " T"] | None = None,
        num_rows: Int32[Array, ""] | None = None,
        implementation: str = "auto",
    ) -> pallas_kernels.UnembedStats:
        """Returns the statistics of the logits; see `pallas_kernels.unembed_stats`.

        Raises ValueError for a head with a softcap, which the op does not know.
        """
        if self.softcap is not None:
            raise ValueError(f"statistics of logits with softcap={self.softcap} are not streamed")
        return pallas_kernels.unembed_stats(
            x,
            self.weight,
            forbidden_ids=forbidden_ids,
            given_ids=given_ids,
            draw_keys=draw_keys,
            temperature=temperature,
            num_rows=num_rows,
            axis_name=None if self.num_ranks == 1 else sharding.AXIS,
            peers=sharding.peers(),
            implementation=implementation,
        )

    def stats_of(
        self,
        logits: Float32[Array, "T V/num_ranks"],
        *,
        draw_keys: UInt32[Array, "T 2"] | None = None,
        temperature: Float32[Array, " T"] | None = None,
    ) -> pallas_kernels.UnembedStats:
        """Returns the statistics of logits of which each rank has those of its ids."""
        return pallas_kernels.logits_stats(
            logits,
            draw_keys=draw_keys,
            temperature=temperature,
            axis_name=None if self.num_ranks == 1 else sharding.AXIS,
            peers=sharding.peers(),
        )
