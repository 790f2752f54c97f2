"""Chunks of generated scenes, drawn and tokenised ahead by processes of the host.

Chunk `number` is a pure function of (seed, number): the sizes take turns, and those of a size show
the scenes of the training split one after the other. Where samples are learnt, nothing is drawn:
their judges need the facts of captions. No device library is imported here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, UInt8

from jdllm import errors
from jdllm.pipelines import prompts
from jdllm.tasks.scenes import drawing, generator, oracle
from jdllm.tasks.scenes.scene import Scene
from jdllm.train import stop_request

Ids = Int32[np.ndarray, "B L"]
Lens = Int32[np.ndarray, " B"]

_AHEAD = 2  # chunks per process
_TRIES = 64  # of a scene whose caption is short enough
_FAR = 10**9  # between the indices of these tries: more scenes than a run draws


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Scenes of one size (height, width); ids past a caption's length are 0.

    Either pictures are drawn, or there are facts of the captions.
    """

    size: tuple[int, int]
    pictures: UInt8[np.ndarray, "B H W 3"] | None
    facts: tuple[oracle.Facts, ...] | None
    ids: Ids
    lens: Lens

    def repeated(self, times: int) -> Chunk:
        """Returns a chunk of captions with each of them so often in a row."""
        assert self.pictures is None and self.facts is not None
        return dataclasses.replace(
            self,
            facts=tuple(facts for facts in self.facts for _ in range(times)),
            ids=np.repeat(self.ids, times, axis=0),
            lens=np.repeat(self.lens, times),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Caption:
    """The ids of one caption."""

    ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.ids)

    def padded(self, width: int) -> Int32[np.ndarray, " L"]:
        return _padded([self.ids], width)[0][0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What makes chunks; it is sent to other processes.

    Captions of chunks have at most `train_caption_tokens`: scenes with longer ones are replaced.
    Other captions have at most `caption_tokens`.
    """

    tokenizer: pathlib.Path
    vocab_size: int
    caption_tokens: int
    train_caption_tokens: int
    turns: tuple[tuple[int, int], ...]  # the sizes of successive chunks
    count: int  # scenes per chunk
    seed: int
    draws: bool = True  # else chunks have facts in place of pictures

    def chunk(self, number: int) -> Chunk:
        turn, place = divmod(number, len(self.turns))
        size = self.turns[place]
        first = self.count * (turn * self.turns.count(size) + self.turns[:place].count(size))
        rows = [self._row(first + i, size) for i in range(self.count)]
        ids, lens = _padded([found for _, found in rows], self.train_caption_tokens)
        pictures = facts = None
        if self.draws:
            pictures = np.stack([drawing.render(scene) for scene, _ in rows])
        else:
            facts = tuple(scene.facts() for scene, _ in rows)
        return Chunk(size=size, pictures=pictures, facts=facts, ids=ids, lens=lens)

    def _row(self, index: int, size: tuple[int, int]) -> tuple[Scene, Sequence[int]]:
        for attempt in range(_TRIES):
            scene = generator.generate(
                index + attempt * _FAR, split="train", seed=self.seed, size=size
            )
            found = self._encode(scene, self.train_caption_tokens)
            if not found.num_cut:
                return scene, found.ids
        raise errors.ConfigError(
            f"train_caption_tokens={self.train_caption_tokens} is too small for captions such as "
            f"{scene.caption!r}"
        )

    def tokens(self, scenes: list[Scene]) -> tuple[Ids, Lens]:
        """Returns the ids of captions as the pipeline encodes prompts, and how many there are."""
        rows = []
        for scene in scenes:
            found = self._encode(scene, self.caption_tokens)
            if found.num_cut:
                raise errors.ConfigError(
                    f"caption_tokens={self.caption_tokens} is too small for {scene.caption!r}"
                )
            rows.append(found.ids)
        return _padded(rows, self.caption_tokens)

    def empty(self) -> Caption:
        """Returns the caption of a request with guidance and no negative prompt."""
        return Caption(tuple(self._encode_text("", self.train_caption_tokens).ids))

    def _encode(self, scene: Scene, most: int) -> prompts.PromptIds:
        return self._encode_text(scene.caption, most)

    def _encode_text(self, text: str, most: int) -> prompts.PromptIds:
        tokenizer = _tokenizer(self.tokenizer, self.vocab_size)
        return tokenizer.encode(text, max_sequence_length=most)


def _padded(rows: Sequence[Sequence[int]], width: int) -> tuple[Ids, Lens]:
    ids = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, np.array([len(row) for row in rows], np.int32)


@functools.cache
def _tokenizer(folder: pathlib.Path, vocab_size: int) -> prompts.ChatTokenizer:
    return prompts.ChatTokenizer(folder, vocab_size=vocab_size)


class Chunks:
    """The chunks from some number on, in order; the first one that is taken starts the processes.

    So `close` can end all that was begun, whenever a signal comes. Processes that a signal ends
    while the interpreter exits may end it with an error of their pool (Python 3.11 and 3.12).
    """

    def __init__(self, maker: Maker, *, first: int, num_workers: int):
        self._maker, self._next = maker, first
        self._made: collections.deque[concurrent.futures.Future[Chunk]] = collections.deque()
        # Forks of a process with device threads may hang, so the processes start afresh.
        self._workers = (
            concurrent.futures.ProcessPoolExecutor(
                num_workers, mp_context=multiprocessing.get_context("spawn")
            )
            if num_workers
            else None
        )
        self._num_ahead = num_workers * _AHEAD

    def take(self, *, waits: bool) -> Chunk | None:
        """Returns the next chunk; None if it is not ready, unless the caller waits."""
        if self._workers is None:
            self._next += 1
            return self._maker.chunk(self._next - 1)
        while len(self._made) < self._num_ahead:
            self._order()
        if not (waits or self._made[0].done()):
            return None
        return self._made.popleft().result()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)

    def _order(self) -> None:
        assert self._workers is not None
        with stop_request.unseen_by_children():  # it starts a process if none is idle
            self._made.append(self._workers.submit(self._maker.chunk, self._next))
        self._next += 1
