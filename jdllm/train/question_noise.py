"""Spoiled question tokens: training answers questions of which some tokens are missing or wrong.

A question is never masked when it is answered. But a model that must answer without some of its
words cannot hang on single words, and a model that must also guess them (`question_loss`) learns
how the words of questions belong together. Tokens that say numbers stay, since no model could guess
them, and so do the tokens of the chat template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, PRNGKeyArray

from jdllm.tasks.word_problems import number_words
from jdllm.train import examples, objective
from jdllm.train.config import TrainConfig

MASKED_SHARE = 0.5  # of the spoiled tokens; the others become random ones
MAX_TARGETS = 16  # spoiled tokens of a row that the model must guess, at most
# Words that are an operand or an operation on their own.
KEPT_WORDS = number_words.WORDS | {"half", "twice", "double", "triple", "dozen", "third", "quarter"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuestionNoise:
    """What may be spoiled, and how much: a row loses a share between 0 and twice `share`.

    `before` and `after` are the numbers of tokens that the chat template writes around a question,
    `may_spoil` says it of every token id.
    """

    share: float
    before: int
    after: int
    may_spoil: Bool[np.ndarray, " V"]
    mask_token_id: int


def of_chat(
    chat: examples.ChatFormat, config: TrainConfig, *, vocab_size: int, mask_token_id: int
) -> QuestionNoise | None:
    """Returns the noise that a run's options ask for, or None."""
    if not config.question_noise_words:
        return None
    one, other = chat.prompts(["a", "7"])
    may_spoil = np.zeros(vocab_size, bool)
    for token, id in chat.tokenizer.get_vocab().items():
        text = chat.decode([id]).strip().lower()  # empty for a special token
        is_exact = any(c.isdigit() for c in text) or text in KEPT_WORDS or text == "$"
        may_spoil[id] = bool(text) and not is_exact and not token.startswith("<")
    return QuestionNoise(
        share=config.question_noise_words,
        before=_common(one, other),
        after=_common(one[::-1], other[::-1]),
        may_spoil=may_spoil,
        mask_token_id=mask_token_id,
    )


def spoil(
    key: PRNGKeyArray, batch: Mapping[str, jax.Array], noise: QuestionNoise
) -> tuple[dict[str, jax.Array], objective.QuestionTargets]:
    """Returns the batch with spoiled questions, and the tokens that these hide."""
    tokens, prompt_lens = batch["tokens"], batch["prompt_lens"]
    B, S = tokens.shape
    key_rate, key_place, key_kind, key_token = jax.random.split(key, 4)
    place = jnp.arange(S)
    in_question = (place >= noise.before) & (place < prompt_lens[:, None] - noise.after)
    can = in_question & jnp.asarray(noise.may_spoil)[tokens]
    rate = jax.random.uniform(key_rate, (B, 1)) * 2 * noise.share
    draw = jnp.where(can, jax.random.uniform(key_place, (B, S)), 2.0)
    spoiled = draw < rate
    ordinary = jnp.asarray(np.flatnonzero(noise.may_spoil), tokens.dtype)
    random = ordinary[jax.random.randint(key_token, (B, S), 0, len(ordinary))]
    is_masked = jax.random.uniform(key_kind, (B, S)) < MASKED_SHARE
    wrong = jnp.where(is_masked, noise.mask_token_id, random).astype(tokens.dtype)
    lowest, places = jax.lax.top_k(-draw, min(MAX_TARGETS, S))
    targets = objective.QuestionTargets(
        places=places,
        tokens=jnp.take_along_axis(tokens, places, axis=1),
        weights=(-lowest < rate).astype(jnp.float32),
    )
    return {**batch, "tokens": jnp.where(spoiled, wrong, tokens)}, targets


def _common(one: list[int], other: list[int]) -> int:
    """Returns how many first tokens agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
