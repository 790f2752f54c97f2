"""Reflow: a flow learns from pairs of noise and what a trained flow, its teacher, makes of it.

Between independent noise and pictures many paths cross, where a flow has their mean velocity: it is
curved, so it needs many Euler steps. The ends of a flow's own paths are pairs whose straight lines
cross less, so a flow that learns them is straighter: rectified flow (Liu et al., "Flow Straight and
Fast", arXiv:2209.03003, section 2). A teacher with guidance makes pairs of the guided flow, whose
student needs none (InstaFlow, arXiv:2309.06380).

With tries, a student learns only samples in which the oracle reads what the caption states, as
language models are tuned on those of their answers that are right (rejection sampling). Where the
sample of a noise is wrong the teacher tries again from noise near it, so that this noise has a
sample too, and one like those that the flow leads to.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int32

from jdllm import errors
from jdllm.tasks.scenes import oracle
from jdllm.train.scenes import chunks, pool, sampling
from jdllm.train.scenes.devices import Devices
from jdllm.train.scenes.judges import Judges
from jdllm.train.scenes.sampling import Noise, Pictures, Sample, Size

logger = logging.getLogger(__name__)

_PAIRS = 2**32 - 1  # sets this randomness apart from that of the run's other parts
_AHEAD = 1  # chunks that the device samples while the host judges
_PATIENCE = 200  # chunks of a size that are judged for one of right samples
_TOLD = (10, 100)  # judged chunks: at first, then each time


@dataclasses.dataclass(slots=True, kw_only=True)
class _Row:
    """A pair that is wanted: a caption and noise."""

    facts: oracle.Facts
    ids: Int32[np.ndarray, " L"]
    length: int
    noise: Float[np.ndarray, "C h w"]
    tried: int = 0


_Pair = tuple[_Row, Float[np.ndarray, "C h w"]]  # with the latents of its right sample
_Waiting = TypeVar("_Waiting", _Row, _Pair)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    size: Size
    rows: list[_Row]
    latents: jax.Array
    pictures: Pictures | None


class Pairs:
    """Chunks of pairs, see `pool.Source`: with `tries`, of right samples alone.

    Captions without a right sample in so many tries are left out. Try `i` begins at
    `sqrt(1 - s^2) * noise + s * other noise` with `s = i / tries`, so the first one at the noise.
    """

    def __init__(
        self,
        captions: chunks.Chunks,
        sample: Sample,
        judges: Judges,
        latent_shape: Callable[[int, int], tuple[int, ...]],
        devices: Devices,
        *,
        chunk: int,
        tries: int,
        seed: int,
        step: int,
    ):
        self._captions, self._sample, self._judges = captions, sample, judges
        self._devices = devices
        self._latent_shape, self._chunk, self._tries = latent_shape, chunk, tries
        # A run that goes on at another step has other noise.
        self._random = np.random.default_rng([seed % 2**32, _PAIRS, step])
        self._begun: collections.deque[_Begun] = collections.deque()
        # Rows of each size that wait for a chunk of them: for another try, and to be learnt.
        self._again: dict[Size, list[_Row]] = collections.defaultdict(list)
        self._right: dict[Size, list[_Pair]] = collections.defaultdict(list)
        self._judged: collections.Counter[Size] = collections.Counter()  # since the last full one
        self._counts: collections.Counter[str] = collections.Counter()

    def take(self, *, waits: bool) -> tuple[Size, pool.Arrays] | None:
        """Judges chunks until one of right samples is full, or just one; see `pool.Source`.

        That blocks until the device has sampled it and the judges have read it. Raises a
        ConfigError for a teacher that is hardly ever right.
        """
        while True:
            while len(self._begun) <= _AHEAD and self._begin(waits=waits):
                pass
            if not self._begun:
                return None
            size = self._sort(self._begun.popleft())
            if len(self._right[size]) >= self._chunk:
                self._judged[size] = 0
                return size, self._devices.put(_arrays(self._first(self._right[size])))
            if self._judged[size] >= _PATIENCE:
                height, width = size
                raise errors.ConfigError(
                    f"the teacher cannot teach: of the last {_PATIENCE * self._chunk} samples of "
                    f"{height}x{width} only {len(self._right[size])} are right"
                )
            if not waits:
                return None

    def close(self) -> None:
        self._captions.close()
        self._begun.clear()

    def _begin(self, *, waits: bool) -> bool:
        """Has the device sample rows that wait for another try, or new ones."""
        full = (size for size, rows in self._again.items() if len(rows) >= self._chunk)
        size = next(full, None)
        if size is not None:
            rows = self._first(self._again[size])
        else:
            chunk = self._captions.take(waits=waits)
            if chunk is None:
                return False
            size, rows = chunk.size, self._rows(chunk)
        ids, lens = _captions_of(rows)
        latents, pictures = self._sample(size, self._starts(rows), ids, lens)
        self._begun.append(_Begun(size=size, rows=rows, latents=latents, pictures=pictures))
        return True

    def _rows(self, chunk: chunks.Chunk) -> list[_Row]:
        shape = (len(chunk.lens), *self._latent_shape(*chunk.size))
        noise = sampling.noise(self._random, shape)
        assert chunk.facts is not None, "captions of a teacher are not drawn"
        return [
            _Row(facts=facts, ids=ids, length=int(length), noise=one.copy())
            for facts, ids, length, one in zip(
                chunk.facts, chunk.ids, chunk.lens, noise, strict=True
            )
        ]

    def _starts(self, rows: list[_Row]) -> Noise:
        noise = np.stack([row.noise for row in rows])
        if not any(row.tried for row in rows):
            return noise
        spread = np.array([row.tried for row in rows], np.float32) / self._tries
        spread = spread.reshape(-1, 1, 1, 1)
        other = self._random.standard_normal(noise.shape, np.float32)
        return (np.sqrt(1 - spread**2) * noise + spread * other).astype(noise.dtype)

    def _sort(self, begun: _Begun) -> Size:
        """Judges the samples of a chunk and puts each row where it waits; returns their size."""
        if begun.pictures is None:
            wrong = [()] * len(begun.rows)
        else:
            facts = [row.facts for row in begun.rows]
            wrong = self._judges.wrong(facts, list(np.asarray(begun.pictures)))
        latents = np.asarray(begun.latents)
        for row, one, reasons in zip(begun.rows, latents, wrong, strict=True):
            row.tried += 1
            is_first = row.tried == 1
            if not reasons:
                # Rows that wait shall not keep whole chunks.
                self._right[begun.size].append((row, one.copy()))
            elif row.tried < self._tries:
                self._again[begun.size].append(row)
            else:
                self._counts["given up"] += 1
            self._counts["right"] += not reasons
            self._counts["first"] += is_first
            self._counts["right at first"] += is_first and not reasons
        self._judged[begun.size] += 1
        self._counts["chunks"] += 1
        first, each = _TOLD
        is_due = self._counts["chunks"] == first or self._counts["chunks"] % each == 0
        if is_due and begun.pictures is not None:
            self._tell()
        return begun.size

    def _tell(self) -> None:
        counts = self._counts
        ended = counts["right"] + counts["given up"]
        logger.info(
            "%d samples of the teacher: %.3f of the first tries are right, %.3f of the captions "
            "that are done",
            counts["chunks"] * self._chunk,
            counts["right at first"] / max(counts["first"], 1),
            counts["right"] / max(ended, 1),
        )

    def _first(self, waiting: list[_Waiting]) -> list[_Waiting]:
        taken = waiting[: self._chunk]
        del waiting[: self._chunk]
        return taken


def _captions_of(rows: list[_Row]) -> tuple[chunks.Ids, chunks.Lens]:
    return np.stack([row.ids for row in rows]), np.array([row.length for row in rows], np.int32)


def _arrays(pairs: list[_Pair]) -> dict[str, np.ndarray]:
    rows = [row for row, _ in pairs]
    ids, lens = _captions_of(rows)
    return {
        pool.LATENTS: np.stack([latents for _, latents in pairs]),
        pool.NOISE: np.stack([row.noise for row in rows]),
        pool.IDS: ids,
        pool.LENS: lens,
    }
