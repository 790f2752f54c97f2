"""The part of a proposal that rules need which insert and delete: `interface.EditProposal`.

The vocabulary is streamed without the mask and the two edit tokens, so its best token is the
ordinary one. The logits of the three are products of their own; they are put in afterwards. Only a
question of the anti-loop rule needs all logits of a position again.

Letters: B rows, T tokens of a block, Q = B * T positions, X excluded tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

import pallas_kernels
from jdllm.decoding.block import interface
from jdllm.layers import unembedding
from jdllm.runner.block import sampling
from jdllm.runner.config import StepConfig
from jdllm.spec import EditTokens

# (row, position in its block) -> logits [V]
LogitsAt = Callable[[Int32[Array, ""], Int32[Array, ""]], Float32[Array, " V"]]


def special(config: StepConfig) -> Special | None:
    """Returns the model's tokens, or None if no algorithm is compiled that moves tokens."""
    if not config.moves_tokens:
        return None
    edits = config.spec.diffusion.edit_tokens
    assert edits is not None, "`algorithm_defaults.choose` refuses models without edit tokens"
    return Special(mask_id=config.mask_token_id, edits=edits)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """The mask and the edit tokens of a model."""

    mask_id: int
    edits: EditTokens

    @property
    def ids(self) -> tuple[int, int, int]:
        """The three ids: the mask, DELETE, SPLIT."""
        return self.mask_id, self.edits.delete, self.edits.split

    def with_edits(
        self, plain: pallas_kernels.UnembedStats, logits: Float32[Array, "Q 3"]
    ) -> pallas_kernels.UnembedStats:
        """Returns the statistics of all tokens but the mask, from those without the three."""
        stats = plain
        for i, token in enumerate(self.ids[1:], start=1):
            stats = _offer(stats, token, logits[:, i])
        return stats

    def proposal(
        self, plain: pallas_kernels.UnembedStats, logits: Float32[Array, "Q 3"], shape: tuple
    ) -> interface.EditProposal:
        """Returns the edit proposal of blocks of `shape` (B, T); nothing is answered yet."""
        return interface.EditProposal(
            mask_id=self.mask_id,
            delete_id=self.edits.delete,
            split_id=self.edits.split,
            mask_logprob=(logits[:, 0] - plain.logsumexp).reshape(shape),
            plain=plain.best_id.reshape(shape),
            plain_logprob=(plain.best_logit - plain.logsumexp).reshape(shape),
            logsumexp=plain.logsumexp.reshape(shape),
            answer=jnp.zeros(shape[0], jnp.int32),
            answer_logprob=jnp.zeros(shape[0], jnp.float32),
        )


def plain_logits(lm_head: unembedding.LMHead, hidden: Float[Array, "B T D"]) -> LogitsAt:
    """Returns the function that gives the logits of a position as the model has them."""

    def at(row: Int32[Array, ""], place: Int32[Array, ""]) -> Float32[Array, " V"]:
        return lm_head.logits(hidden[row, place][None])[0]

    return at


def answered(
    proposal: interface.Proposal, question: interface.Question, logits_at: LogitsAt
) -> interface.Proposal:
    """Returns the proposal with the answers; of equal logits, the lowest id wins."""
    edits = proposal.edits
    assert edits is not None, "only rules that move tokens ask"
    count = jnp.sum(question.wants)
    (rows,) = jnp.nonzero(question.wants, size=question.wants.shape[0], fill_value=0)

    def answer_one(
        i: Int32[Array, ""], answers: tuple[Int32[Array, " B"], Float32[Array, " B"]]
    ) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
        r = rows[i]
        logits = logits_at(r, question.place[r])
        excluded = jnp.where(question.excluded[r] < 0, logits.shape[0], question.excluded[r])
        logits = logits.at[excluded].set(sampling.NEVER, mode="drop")
        best = jnp.argmax(logits).astype(jnp.int32)
        logprob = logits[best] - edits.logsumexp[r, question.place[r]]
        return answers[0].at[r].set(best), answers[1].at[r].set(logprob)

    # One turn for each row that asks, as for rows that draw (`proposal.py`).
    answer, logprob = jax.lax.fori_loop(0, count, answer_one, (edits.answer, edits.answer_logprob))
    return dataclasses.replace(
        proposal, edits=dataclasses.replace(edits, answer=answer, answer_logprob=logprob)
    )


def _offer(
    stats: pallas_kernels.UnembedStats, token: int, logit: Float32[Array, " Q"]
) -> pallas_kernels.UnembedStats:
    """Returns the statistics with one more token among those that may be best or second."""
    is_best = (logit > stats.best_logit) | ((logit == stats.best_logit) & (token < stats.best_id))
    is_second = (logit > stats.second_logit) | (
        (logit == stats.second_logit) & (token < stats.second_id)
    )
    return dataclasses.replace(
        stats,
        best_id=jnp.where(is_best, token, stats.best_id),
        best_logit=jnp.where(is_best, logit, stats.best_logit),
        second_id=jnp.where(is_best, stats.best_id, jnp.where(is_second, token, stats.second_id)),
        second_logit=jnp.where(
            is_best, stats.best_logit, jnp.where(is_second, logit, stats.second_logit)
        ),
    )
