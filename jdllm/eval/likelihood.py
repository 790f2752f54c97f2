"""Monte-Carlo log-likelihood of a text under a masked diffusion model.

Such a model has no chain rule. What it defines is the mean, over all orders in which the L tokens
of a target can be written, of the sum of their log-probabilities. LLaDA's evaluation estimates
that mean, and so does this module: draw l from 1..L and l of the tokens, mask them, and weigh the
sum of their log-probabilities by L / l. By Jensen's inequality the mean is a lower bound of the
log-probability of the text.

Full attention (LLaDA, Dream): the whole target is masked at once, and the text ends with it.
Block-causal (LLaDA2): the target is cut at the model's block borders. Each piece is estimated by
itself, given the true tokens of all earlier blocks and of its own block before it; the places
behind the target in its last block stay masked, as in generation. The sum is the result.

A target with at most `num_samples` masks gets each of them once, which is the exact mean. For
others, l is drawn systematically (one draw shifts a grid of `num_samples` values), which leaves
each l as likely as before and removes noise. The draws depend on the seed, the tokens before the
target and its length, thus not on other requests, and choices of equal length share their masks.

Letters: n samples, L tokens of a piece, and those of `full_forward`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

from jdllm import errors
from jdllm.host import progress
from jdllm.runner import full_forward
from jdllm.spec import AttentionPattern, ModelSpec

NUM_SAMPLES = 128  # of LLaDA's published evaluation
TOKENS_PER_FORWARD, MAX_ROWS = 8192, 64
MIN_LENGTH, MIN_PLACES = 32, 8


class Model(Protocol):
    """A `full_forward.FullModel`, or what stands in for one."""

    @property
    def spec(self) -> ModelSpec: ...

    def token_scores(
        self,
        ids: Int[np.ndarray, "B S"],
        lengths: Int[np.ndarray, " B"],
        positions: Int[np.ndarray, "B P"],
        tokens: Int[np.ndarray, "B P"],
    ) -> full_forward.TokenScores: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The estimate in nats, and whether greedy decoding would write the target.

    Greedy decoding writes one token per forward, the most probable one of all masked places.
    """

    logprob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Tokens `start`..`start + L` of `ids` are to be scored; what follows them stays masked."""

    ids: Int32[np.ndarray, " S"]
    start: int
    tokens: Int32[np.ndarray, " L"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of a forward: the piece with these of its tokens masked."""

    request: int
    piece: _Piece
    masked: Bool[np.ndarray, " L"]
    weight: float = 1.0


class Likelihood:
    """Scores (context, target) pairs of token ids; `seed` is an integer of at least 0.

    `batch_size` is the number of rows in every forward; by default it depends on their length.
    Without `checks_greedy`, `is_greedy` is always false, and the forwards for it are saved.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_samples: int = NUM_SAMPLES,
        seed: int = 0,
        batch_size: int | None = None,
        checks_greedy: bool = True,
    ):
        diffusion = model.spec.diffusion
        if diffusion.mask_token_id is None or diffusion.kind is None:
            raise NotImplementedError(
                f"{model.spec.architecture} has no mask token; the Monte-Carlo likelihood is "
                "defined for masked diffusion models only"
            )
        if diffusion.is_causal:
            raise NotImplementedError(
                f"{model.spec.architecture} denoises a block behind a causal context; the "
                "Monte-Carlo likelihood is defined for models with one attention pattern"
            )
        for name, value, low in (
            ("num_samples", num_samples, 1),
            ("seed", seed, 0),
            ("batch_size", 1 if batch_size is None else batch_size, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise errors.ConfigError(f"{name}={value!r} must be an integer of at least {low}")
        self._model = model
        self._diffusion = diffusion
        self._mask_id = diffusion.mask_token_id
        self._num_samples = num_samples
        self._seed = seed
        self._batch_size = batch_size
        self._checks_greedy = checks_greedy

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Returns one score per (context, target); refuses pairs that the model cannot hold."""
        pieces = [self._pieces(context, target) for context, target in pairs]
        # Summed exactly, so that the order in which rows come back does not matter.
        terms: list[list[float]] = [[] for _ in pairs]
        total = sum(self._num_rows(len(piece.tokens)) for parts in pieces for piece in parts)
        with progress.bar(total=total, desc="likelihood", unit="row") as bar:
            for row, logprobs, _, _ in self._forwards(self._sampled_rows(pieces)):
                terms[row.request].append(row.weight * float(logprobs[row.masked].sum()))
                bar.update()
        greedy = self._greedy(pieces) if self._checks_greedy else [False] * len(pairs)
        return [
            Score(logprob=math.fsum(values), is_greedy=is_greedy)
            for values, is_greedy in zip(terms, greedy, strict=True)
        ]

    def _pieces(self, context: Sequence[int], target: Sequence[int]) -> list[_Piece]:
        ids = np.array([*context, *target], np.int32)
        start, end = len(context), len(ids)
        if start == end:
            return []
        if self._diffusion.is_shifted and start == 0:
            raise errors.RequestError("a model with shifted logits needs a token before the target")
        block = self._diffusion.block_size
        is_full = self._diffusion.attention_pattern is AttentionPattern.FULL
        last = end if is_full else -(-end // block) * block
        if last > self._model.spec.max_position_embeddings:
            raise errors.RequestTooLong(
                f"context and target have {end} tokens; the model holds "
                f"{self._model.spec.max_position_embeddings}"
            )
        if is_full:
            return [_Piece(ids=ids, start=start, tokens=ids[start:])]
        padded = np.concatenate([ids, np.full(last - end, self._mask_id, np.int32)])
        borders = [start, *range((start // block + 1) * block, end, block), end]
        return [
            _Piece(ids=padded[: -(-stop // block) * block], start=begin, tokens=ids[begin:stop])
            for begin, stop in zip(borders, borders[1:], strict=False)
        ]

    def _num_rows(self, length: int) -> int:
        return num_masks(length, self._num_samples)

    def _sampled_rows(self, pieces: Sequence[Sequence[_Piece]]) -> Iterator[_Row]:
        for request, parts in enumerate(pieces):
            for piece in parts:
                before = piece.ids[: piece.start]
                masks, weights = draw_masks(
                    len(piece.tokens), self._num_samples, self._seed, before
                )
                for masked, weight in zip(masks, weights, strict=True):
                    yield _Row(request=request, piece=piece, masked=masked, weight=float(weight))

    def _greedy(self, pieces: Sequence[Sequence[_Piece]]) -> list[bool]:
        """Returns for each request whether greedy decoding writes its target, piece by piece.

        A round is one forward for each request that has matched so far.
        """
        left = {request: list(parts) for request, parts in enumerate(pieces)}
        masked = {
            request: np.ones(len(parts[0].tokens), bool) for request, parts in left.items() if parts
        }
        matches = [True] * len(pieces)
        while masked:
            rows = [
                _Row(request=request, piece=left[request][0], masked=mask)
                for request, mask in masked.items()
            ]
            for row, _, best_ids, best_logprobs in self._forwards(rows):
                place = int(np.argmax(np.where(row.masked, best_logprobs, -np.inf)))
                mask = row.masked.copy()
                mask[place] = False
                if best_ids[place] != row.piece.tokens[place]:
                    matches[row.request] = False
                    del masked[row.request]
                elif mask.any():
                    masked[row.request] = mask
                elif len(left[row.request]) > 1:
                    del left[row.request][0]
                    masked[row.request] = np.ones(len(left[row.request][0].tokens), bool)
                else:
                    del masked[row.request]
        return matches

    def _forwards(
        self, rows: Iterable[_Row]
    ) -> Iterator[tuple[_Row, Float64[np.ndarray, " L"], np.ndarray, np.ndarray]]:
        """Yields (row, log-probabilities, best ids, their log-probabilities) of each row.

        The shape of a forward depends on the row alone: rows of equal shape share forwards, and
        repeated rows fill the last one. So a row's numbers do not depend on other requests.
        """
        waiting: dict[tuple[int, int], list[_Row]] = collections.defaultdict(list)
        for row in rows:
            shape = self._shape(row.piece)
            waiting[shape].append(row)
            if len(waiting[shape]) == self._rows_of(shape[0]):
                yield from self._forward(shape, waiting.pop(shape))
        for shape, rest in waiting.items():
            yield from self._forward(shape, rest)

    def _forward(
        self, shape: tuple[int, int], rows: Sequence[_Row]
    ) -> Iterator[tuple[_Row, Float64[np.ndarray, " L"], np.ndarray, np.ndarray]]:
        length, num_places = shape
        count = self._rows_of(length)
        ids = np.full((count, length), self._mask_id, np.int32)
        lengths = np.empty(count, np.int32)
        positions, tokens = np.empty((2, count, num_places), np.int32)
        for i in range(count):
            row = rows[min(i, len(rows) - 1)]
            piece, size = row.piece, len(row.masked)
            lengths[i] = len(piece.ids)
            ids[i, : lengths[i]] = piece.ids
            ids[i, piece.start : piece.start + size][row.masked] = self._mask_id
            positions[i] = piece.start + np.minimum(np.arange(num_places), size - 1)
            tokens[i] = piece.tokens[np.minimum(np.arange(num_places), size - 1)]
        scores = self._model.token_scores(ids, lengths, positions, tokens)
        logprobs = np.asarray(scores.logprob, np.float64)
        best_ids, best = np.asarray(scores.best_id), np.asarray(scores.best_logprob)
        for i, row in enumerate(rows):
            size = len(row.masked)
            yield row, logprobs[i, :size], best_ids[i, :size], best[i, :size]

    def _shape(self, piece: _Piece) -> tuple[int, int]:
        """Returns (S, P), the lengths of the forward for a piece."""
        limit = self._model.spec.max_position_embeddings
        length = min(rounded_up(max(len(piece.ids), MIN_LENGTH)), limit)
        return length, max(1 << (len(piece.tokens) - 1).bit_length(), MIN_PLACES)

    def _rows_of(self, length: int) -> int:
        return self._batch_size or max(1, min(TOKENS_PER_FORWARD // length, MAX_ROWS))


def rounded_up(length: int) -> int:
    """Returns the next number of the form 4..7 times a power of two: at most a quarter more."""
    unit = 1 << max(length.bit_length() - 3, 0)
    return -(-length // unit) * unit


def num_masks(length: int, num_samples: int) -> int:
    """Returns how many masks `draw_masks` returns."""
    is_enumerated = length <= num_samples.bit_length() and 2**length - 1 <= num_samples
    return 2**length - 1 if is_enumerated else num_samples


def draw_masks(
    length: int, num_samples: int, seed: int, before: Int32[np.ndarray, " C"]
) -> tuple[Bool[np.ndarray, "n L"], Float64[np.ndarray, " n"]]:
    """Returns masks of `length` tokens and the weights of their sums of log-probabilities.

    All masks, if there are at most `num_samples`; then the weighted sum is the exact mean.
    """
    count = num_masks(length, num_samples)
    if count == 2**length - 1:
        masks = np.arange(1, 2**length)[:, None] >> np.arange(length) & 1 == 1
        sizes = masks.sum(axis=1)
        return masks, np.array([1 / (size * math.comb(length, int(size))) for size in sizes])
    digest = hashlib.sha256(np.asarray(before, "<i4").tobytes()).digest()
    rng = np.random.default_rng([seed, length, int.from_bytes(digest, "little")])
    grid = (rng.random() + np.arange(count)) / count
    sizes = 1 + np.minimum((grid * length).astype(int), length - 1)
    ranks = rng.permuted(np.tile(np.arange(length), (count, 1)), axis=1)
    return ranks < sizes[:, None], length / (sizes * count)
