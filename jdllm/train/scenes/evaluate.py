"""Measures an image run on held-out scenes: how many pictures the oracle finds right.

The first stage is measured by its reconstructions of drawn pictures, which bound what the second
can reach; the second by pictures of captions, with the steps that the engine takes.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from jdllm.tasks.scenes import drawing, generator
from jdllm.tasks.scenes import pictures as scene_pictures
from jdllm.train.recipe import Params
from jdllm.train.scenes import chunks, programs
from jdllm.train.scenes.config import SceneConfig
from jdllm.train.scenes.judges import Judges
from jdllm.train.scenes.networks import Networks

logger = logging.getLogger(__name__)

Pictures = UInt8[np.ndarray, "B H W 3"]
_SHOWN = 48  # pictures of a contact sheet


class Evaluator:
    """Held-out scenes of every size, the same at each call."""

    def __init__(
        self,
        networks: Networks,
        config: SceneConfig,
        maker: chunks.Maker,
        compiled: programs.Programs,
        judges: Judges,
    ):
        self._networks, self._config, self._compiled = networks, config, compiled
        self._judges = judges
        rows = -(-config.eval_problems // len(config.shapes))
        self._scenes = {
            size: [generator.generate(i, split="test", size=size) for i in range(rows)]
            for size in config.shapes
        }
        self._tokens = {size: maker.tokens(scenes) for size, scenes in self._scenes.items()}

    def reconstructions(self, params: Params) -> tuple[dict[str, float], Pictures]:
        """Returns the share of right pictures and the mean error of values, and a contact sheet."""
        made, errors = {}, []
        for size, scenes in self._scenes.items():
            drawn = np.stack([drawing.render(scene) for scene in scenes])
            made[size] = self._reconstructed(params, drawn)
            errors.append(np.abs(made[size].astype(np.float32) - drawn).mean())
        accuracy, _ = self._judged(made)
        numbers = {"accuracy@reconstruction": accuracy, "pixel_error": float(np.mean(errors))}
        return numbers, self._sheet(made)

    def _reconstructed(self, params: Params, drawn: Pictures) -> Pictures:
        # Chunks are the size that encoding was compiled for, rows that of decoding.
        count, chunk = len(drawn), self._config.chunk_scenes
        latents = [
            self._compiled.encode(params, jnp.asarray(_padded(drawn[i : i + chunk], chunk)))
            for i in range(0, count, chunk)
        ]
        rows = jnp.concatenate(latents)[:count].astype(jnp.float32)
        return np.asarray(self._compiled.decode(drawn.shape[1:3], params, rows))

    def samples(
        self, params: Params, step_counts: Sequence[int], scales: Sequence[float]
    ) -> tuple[dict[str, float], Pictures]:
        """Returns the share of right pictures for each number of steps and guidance scale.

        The contact sheet shows the first scale, and the largest number of steps that is not above
        8, else the first one.
        """
        numbers, sheets = {}, {}
        for scale, steps in itertools.product(scales, step_counts):
            made = {size: self._sampled(params, size, steps, scale) for size in self._scenes}
            accuracy, wrong = self._judged(made)
            numbers[f"accuracy@{steps}" + (f"_guidance={scale:g}" if scale else "")] = accuracy
            sheets.setdefault(steps, self._sheet(made))
            logger.info(
                "%d steps, guidance %g: %.3f right; wrong: %s", steps, scale, accuracy, dict(wrong)
            )
        shown = max((steps for steps in sheets if steps <= 8), default=next(iter(sheets)))
        return numbers, sheets[shown]

    def _sampled(self, params: Params, size: tuple[int, int], steps: int, scale: float) -> Pictures:
        ids, lens = self._tokens[size]
        pipeline = self._networks.pipeline
        captions = self._compiled.captions(params, ids, lens)
        shape = (len(lens), *pipeline.latent_shape(*size))
        x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
        sigmas = pipeline.sigmas(steps, *size)
        for sigma, next_sigma in zip(sigmas, sigmas[1:]):
            levels = (np.full(len(lens), one, np.float32) for one in (sigma, next_sigma))
            x = self._compiled.denoise(size, params, x, *levels, *captions, np.float32(scale))
        return np.asarray(self._compiled.decode(size, params, x))

    def _judged(
        self, made: Mapping[tuple[int, int], Pictures]
    ) -> tuple[float, collections.Counter[str]]:
        """Returns the share of right pictures, and how often each kind of fact is wrong."""
        facts = [scene.facts() for size in made for scene in self._scenes[size]]
        pictures = [picture for of_size in made.values() for picture in of_size]
        found = self._judges.wrong(facts, pictures)
        kinds = ({reason.partition(":")[0] for reason in wrong} for wrong in found)
        return (
            float(np.mean([not wrong for wrong in found])),
            collections.Counter(itertools.chain.from_iterable(kinds)),
        )

    def _sheet(self, made: Mapping[tuple[int, int], Pictures]) -> Pictures:
        """Returns pictures of all sizes, in the corners of the places of a sheet."""
        sides = np.max([*made], axis=0)
        shown = []
        for pictures in made.values():
            for picture in pictures[: -(-_SHOWN // len(made))]:
                place = np.full((*sides, 3), 255, np.uint8)
                place[: picture.shape[0], : picture.shape[1]] = picture
                shown.append(place)
        return scene_pictures.contact_sheet(shown, columns=10)


def _padded(pictures: Pictures, count: int) -> Pictures:
    missing = count - len(pictures)
    return np.pad(pictures, ((0, missing), (0, 0), (0, 0), (0, 0)))
