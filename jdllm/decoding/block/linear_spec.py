"""Rules whose output is that of causal forwards: Autoregressive and LinearSpec.

Both are rules of causal families (Nemotron-Labs-Diffusion). `Autoregressive` writes one token per
forward. `LinearSpec` is self-speculation, as vLLM and SGLang call it: a block of the next token and
masks is denoised, which drafts the tokens after it, and the causal forward of the block accepts
those that it would have written itself. So its output is that of `Autoregressive`, also where
tokens are drawn: a draw depends on the seed, the position and the tokens before it alone. Drafts
are drawn with the same random numbers, so that likely tokens meet.

Letters: R rows, B positions of a block.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jdllm.decoding.block import fill, interface


@dataclasses.dataclass(frozen=True, slots=True)
class LinearSpec(fill.BlockRule):
    """Drafts all positions with a probability of at least `threshold`, or the most probable one."""

    def block_length(self, params: interface.BlockParams, most: int) -> Int32[Array, " R"]:
        """Returns what the row asks for, as far as the block holds it."""
        return jnp.clip(params.block_length, 1, most)

    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "R B"]:
        return jnp.exp(proposal.logprob) >= block.params.threshold[:, None]


@dataclasses.dataclass(frozen=True, slots=True)
class Autoregressive(fill.BlockRule):
    """Drafts nothing."""

    def block_length(self, params: interface.BlockParams, most: int) -> Int32[Array, " R"]:
        """Returns 1, the position of the next token."""
        del most
        return jnp.ones_like(params.block_length)

    def choose(
        self, block: interface.BlockState, proposal: interface.Proposal
    ) -> Bool[Array, "R B"]:
        del proposal
        return block.masked  # there are none
