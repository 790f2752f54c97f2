"""A flow learns from the oracle's verdicts on its own samples: DiffusionNFT (arXiv:2509.16117).

A run paints each caption several times with its averaged weights, the old policy, in as many Euler
steps as it will be served with, and the oracle says which pictures are right. The advantage of a
sample is its verdict (1 or 0) less the share of right ones in its group, those of the same caption,
in standard deviations of the present verdicts at its size. So captions that are always right, or
never, teach nothing. At fresh noise the flow learns the old policy's velocity, moved towards that
of the sample where its advantage is positive and away from it where it is negative; see
`objectives.policy_loss`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jdllm.train.scenes import chunks, pool, sampling
from jdllm.train.scenes.devices import Devices
from jdllm.train.scenes.judges import Judges
from jdllm.train.scenes.sampling import Pictures, Sample, Size

logger = logging.getLogger(__name__)

_POLICY = 2**32 - 2  # sets this randomness apart from that of the run's other parts
_AHEAD = 1  # chunks that the device samples, and as many that are judged, meanwhile
_KEEP = 0.9  # of the share of right samples of a size, after each chunk of it
_LEAST_DEVIATION = 0.1
_TOLD = 100  # chunks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Painted:
    chunk: chunks.Chunk
    latents: jax.Array
    pictures: Pictures


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    painted: _Painted
    wrong: Iterator[tuple[str, ...]]  # as they are found


class Samples:
    """Chunks of samples with their advantages, `group` of each caption; see `pool.Source`."""

    def __init__(
        self,
        captions: chunks.Chunks,
        sample: Sample,
        judges: Judges,
        latent_shape: Callable[[int, int], tuple[int, ...]],
        devices: Devices,
        *,
        group: int,
        seed: int,
        step: int,
    ):
        self._group = group
        self._captions, self._sample, self._judges = captions, sample, judges
        self._latent_shape, self._devices = latent_shape, devices
        # A run that goes on at another step has other noise.
        self._random = np.random.default_rng([seed % 2**32, _POLICY, step])
        self._painted: collections.deque[_Painted] = collections.deque()
        self._judged: collections.deque[_Judged] = collections.deque()
        self._share: dict[Size, float] = {}
        self._recent: list[float] = []

    def take(self, *, waits: bool) -> tuple[Size, pool.Arrays] | None:
        """Returns the oldest chunk, once the judges have read it; see `pool.Source`."""
        while len(self._painted) <= _AHEAD and self._paint(waits=waits):
            pass
        while self._painted and len(self._judged) <= _AHEAD:
            self._judge(self._painted.popleft())
        if not self._judged:
            return None
        judged = self._judged.popleft()
        right = np.array([not reasons for reasons in judged.wrong], np.float32)
        chunk = judged.painted.chunk
        named = {
            pool.IDS: chunk.ids,
            pool.LENS: chunk.lens,
            pool.ADVANTAGE: self._advantage(chunk.size, right),
        }
        return chunk.size, self._devices.put(named) | {pool.LATENTS: judged.painted.latents}

    def close(self) -> None:
        self._captions.close()
        self._painted.clear()
        self._judged.clear()

    def _paint(self, *, waits: bool) -> bool:
        captions = self._captions.take(waits=waits)
        if captions is None:
            return False
        chunk = captions.repeated(self._group)
        shape = (len(chunk.lens), *self._latent_shape(*chunk.size))
        noise = sampling.noise(self._random, shape)
        latents, pictures = self._sample(chunk.size, noise, chunk.ids, chunk.lens)
        assert pictures is not None, "samples of a policy are judged"
        self._painted.append(_Painted(chunk=chunk, latents=latents, pictures=pictures))
        return True

    def _judge(self, painted: _Painted) -> None:
        assert painted.chunk.facts is not None, "captions of samples are not drawn"
        wrong = self._judges.begun(painted.chunk.facts, list(np.asarray(painted.pictures)))
        self._judged.append(_Judged(painted=painted, wrong=wrong))

    def _advantage(self, size: Size, right: np.ndarray) -> np.ndarray:
        share = float(right.mean())
        before = self._share.get(size, share)
        self._share[size] = _KEEP * before + (1 - _KEEP) * share
        self._recent.append(share)
        if len(self._recent) == _TOLD:
            logger.info("of the last %d chunks of samples %.3f are right", _TOLD,
                        np.mean(self._recent))  # fmt: skip
            self._recent.clear()
        deviation = max((before * (1 - before)) ** 0.5, _LEAST_DEVIATION)
        groups = right.reshape(-1, self._group)
        advantage = (groups - groups.mean(axis=1, keepdims=True)) / deviation
        return advantage.ravel().astype(np.float32)
