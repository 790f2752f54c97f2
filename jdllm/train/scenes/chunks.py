"""Chunks of generated scenes, drawn and tokenised ahead by processes of the host.

Chunk `number` is a pure function of (seed, number): the scenes of the training split follow each
other, and the sizes take turns. No device library is imported here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import pathlib

import numpy as np
from jaxtyping import Int32, UInt8

from jdllm import errors
from jdllm.imagegen import prompts
from jdllm.tasks.scenes import drawing, generator
from jdllm.tasks.scenes.scene import Scene

_AHEAD = 2  # chunks per process


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Scenes of one size (height, width); ids past a caption's length are 0."""

    size: tuple[int, int]
    pictures: UInt8[np.ndarray, "B H W 3"]
    ids: Int32[np.ndarray, "B L"]
    lens: Int32[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What makes chunks; it is sent to other processes."""

    tokenizer: pathlib.Path
    vocab_size: int
    caption_tokens: int
    sizes: tuple[tuple[int, int], ...]
    count: int  # scenes per chunk
    seed: int

    def chunk(self, number: int) -> Chunk:
        turn, place = divmod(number, len(self.sizes))
        size = self.sizes[place]
        first = turn * self.count
        scenes = [
            generator.generate(first + i, split="train", seed=self.seed, size=size)
            for i in range(self.count)
        ]
        ids, lens = self.tokens(scenes)
        pictures = np.stack([drawing.render(scene) for scene in scenes])
        return Chunk(size=size, pictures=pictures, ids=ids, lens=lens)

    def tokens(
        self, scenes: list[Scene]
    ) -> tuple[Int32[np.ndarray, "B L"], Int32[np.ndarray, " B"]]:
        """Returns the ids of captions as the pipeline encodes prompts, and how many there are."""
        tokenizer = _tokenizer(self.tokenizer, self.vocab_size)
        ids = np.zeros((len(scenes), self.caption_tokens), np.int32)
        lens = np.zeros(len(scenes), np.int32)
        for i, scene in enumerate(scenes):
            found = tokenizer.encode(scene.caption, max_sequence_length=self.caption_tokens)
            if found.num_cut:
                raise errors.ConfigError(
                    f"caption_tokens={self.caption_tokens} is too small for {scene.caption!r}"
                )
            ids[i, : len(found.ids)] = found.ids
            lens[i] = len(found.ids)
        return ids, lens


@functools.cache
def _tokenizer(folder: pathlib.Path, vocab_size: int) -> prompts.ChatTokenizer:
    return prompts.ChatTokenizer(folder, vocab_size=vocab_size)


class Chunks:
    """The chunks from some number on, in order."""

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
        for _ in range(num_workers * _AHEAD):
            self._order()

    def take(self, *, waits: bool) -> Chunk | None:
        """Returns the next chunk; None if it is not ready, unless the caller waits."""
        if self._workers is None:
            self._next += 1
            return self._maker.chunk(self._next - 1)
        if not (waits or self._made[0].done()):
            return None
        self._order()
        return self._made.popleft().result()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)

    def _order(self) -> None:
        assert self._workers is not None
        self._made.append(self._workers.submit(self._maker.chunk, self._next))
        self._next += 1
