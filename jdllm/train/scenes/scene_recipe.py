"""The recipe of text-to-image pipelines: Z-Image's three models on generated scenes.

Two stages in one run. The first trains the autoencoder. The second trains text encoder and
transformer together, in the latents of the first, whose weights stay as they are. Both draw their
batches from a pool of scenes on the device, which processes of the host fill. Where samples, a
teacher's or the run's own, take the place of drawn pictures, there is the second stage only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import PIL.Image

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.train import clock, recipe
from jdllm.train.scenes import (
    chunks,
    devices,
    evaluate,
    export,
    judges,
    networks,
    objectives,
    policy,
    pool,
    programs,
    reflow,
    sampling,
    teacher,
    update,
)
from jdllm.train.scenes.config import SceneConfig

logger = logging.getLogger(__name__)

_INTERMEDIATE = 8  # forwards per picture of an evaluation before the end


class SceneRecipe:
    """See `recipe.Recipe`."""

    unit = "pictures"

    def __init__(self, config: SceneConfig, output_dir: pathlib.Path):
        self._config, self._output_dir = config, output_dir
        self._ends = contextlib.ExitStack()
        self._devices = devices.Devices(config.dp_size)
        self._teacher: recipe.Params | None = None
        self._networks = networks.build(
            source.resolve(config.model_path),
            output_dir / "pipeline",
            config.compute_dtype,
            attention=config.attention,
        )
        self._maker = chunks.Maker(
            tokenizer=self._networks.folder / "tokenizer",
            vocab_size=self._networks.configs[networks.TEXT].vocab_size,
            caption_tokens=config.caption_tokens,
            train_caption_tokens=config.train_caption_tokens,
            turns=config.turns,
            count=config.chunk_captions,
            seed=config.seed,
            draws=not config.learns_samples,
        )

    @property
    def batch_size(self) -> int:
        config = self._config
        return config.batch_size if self._stage == "flow" else config.vae_batch_size

    def first_state(self) -> update.SceneState:
        params = networks.init_params(self._networks, self._config.seed)
        return self._devices.put(update.init(self._config, params, average=params, step=0))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = {path: shape.shape for path, shape in self._networks.shapes.items()}
        return own | {networks.SHIFT: (), networks.FACTOR: ()}

    def weights_of(self, folder: pathlib.Path) -> recipe.Weights:
        weights = networks.read_params(self._networks, folder)
        return recipe.Weights(step=0, params=weights, average=weights)

    def adopt(self, weights: recipe.Weights) -> update.SceneState:
        self._read_teacher(weights.average)  # before an older run in the folder is set aside
        return self._devices.put(
            update.init(self._config, weights.params, average=weights.average, step=weights.step)
        )

    def batches(self, state: update.SceneState, passed: clock.Passed) -> pool.ScenePool:
        config, self._began = self._config, time.monotonic() - passed.run
        self._read_teacher(state.average)
        self._check_stage(state)
        self._state, self._number = state, int(state.step)
        threads = concurrent.futures.ThreadPoolExecutor(programs.THREADS)
        self._ends.callback(threads.shutdown, cancel_futures=True)
        self._programs = programs.Programs(
            self._networks,
            config,
            self._devices,
            state,
            self._teacher,
            self._maker.empty(),
            threads,
        )
        judging = judges.Judges(config.data_workers)
        self._ends.callback(judging.close)
        source_ = self._source(judging)
        self._ends.callback(source_.close)
        self._pool = pool.ScenePool(
            source_,
            config.turns,
            capacity=config.pool_scenes,
            chunk=config.chunk_scenes,
            steps_per_chunk=config.steps_per_chunk,
        )
        self._evaluator = evaluate.Evaluator(
            self._networks, config, self._maker, self._programs, judging
        )
        self._programs.wait_for(state.stage)  # a stage's minutes are not those of compilation
        self._begin_stage(state.stage, first=int(state.start_step), passed=passed.stage)
        if state.stage == "flow" and not config.learns_samples:
            self._pool.encode(self._encode_with(state.average))
        return self._pool

    def passed(self) -> clock.Passed:
        return clock.Passed(run=time.monotonic() - self._began, stage=self._clock.passed())

    def is_over(self, number: int) -> bool:
        return self._stage == "flow" and self._clock.share(number) >= 1

    def step(
        self, state: update.SceneState, batch: pool.View
    ) -> tuple[update.SceneState, Mapping[str, jax.Array]]:
        if self._stage == "vae" and self._clock.share(self._number) >= 1:
            state = self._begin_flow(state)
            batch = self._pool.view(batch.size)
        rate = self._clock.rate(self._number)
        self._number += 1
        state, metrics = self._programs.step(self._stage, state, batch, rate)
        self._state = state
        return state, metrics

    def evaluate(self, state: update.SceneState) -> dict[str, float]:
        if self._stage == "vae":
            params = state.average | {networks.FACTOR: jnp.ones(())}
            numbers, sheet = self._evaluator.reconstructions(params)
        else:
            is_end = self.is_over(self._number)
            counts = self._config.eval_steps if is_end else (_INTERMEDIATE,)
            scales = self._config.eval_guidance[: None if is_end else 1]
            numbers, sheet = self._evaluator.samples(state.average, counts, scales)
        self._write_sheet(sheet, f"{self._stage}-{self._number}")
        return numbers

    def export(self, state: update.SceneState, output_dir: pathlib.Path) -> None:
        del output_dir  # the folder was begun with the run
        config = self._config
        # A teacher's guidance is in its pictures; without empty captions none could be learnt.
        is_guided = not config.teacher_guidance and config.caption_dropout > 0
        scale = None if not config.learns_samples or is_guided else 0
        export.write(self._networks, state.average, guidance_scale=scale)

    def close(self) -> None:
        self._ends.close()

    def _begin_stage(self, stage: str, *, first: int, passed: float = 0.0) -> None:
        self._stage, config, began = stage, self._config, time.monotonic() - passed
        is_flow = stage == "flow"
        minutes = config.max_minutes if is_flow else config.vae_minutes
        # The minutes of the flow are what the run has left of them.
        before = began - self._began if is_flow else 0.0
        self._clock = clock.Clock(
            peak=config.learning_rate if is_flow else config.vae_learning_rate,
            warmup_steps=config.warmup_steps,
            decay_share=config.decay_share,
            first=first,
            last=config.num_steps if is_flow else config.vae_steps,
            seconds=None if minutes is None else 60 * minutes - before,
            began=began,
        )

    def _begin_flow(self, state: update.SceneState) -> update.SceneState:
        """Returns the state with fixed latents: their shift and factor are measured."""
        taken = time.monotonic()
        encode = self._encode_with(state.average)  # neither shifted nor scaled yet
        parts = []
        for size in self._config.shapes:
            pictures = self._pool.view(size).arrays[pool.PICTURES]
            latents = encode({pool.PICTURES: pictures[: self._config.chunk_scenes]})[pool.LATENTS]
            parts.append(latents.astype(jnp.float32).ravel())
        shift, factor = objectives.measured(jnp.concatenate(parts))
        numbers = {networks.SHIFT: shift, networks.FACTOR: factor}
        fixed = {path: jnp.copy(array) for path, array in update.own(state.average, "vae").items()}
        state = dataclasses.replace(
            state,
            start_step=jnp.copy(state.step),
            params=state.params | fixed | numbers,
            average=state.average | jax.tree.map(jnp.copy, numbers),
        )
        numbers, sheet = self._evaluator.reconstructions(state.average)
        self._write_sheet(sheet, "reconstructions")
        self._pool.encode(self._encode_with(state.average))
        self._begin_stage("flow", first=self._number)
        logger.info(
            "step %d: latents have shift %.3f, factor %.3f; %s; the change of stage took %.1f s",
            self._number, float(shift), float(factor), json.dumps(numbers),
            time.monotonic() - taken,
        )  # fmt: skip
        return state

    def _read_teacher(self, params: recipe.Params) -> None:
        if self._config.teacher is not None and self._teacher is None:
            found = teacher.read(self._networks, self._config.teacher, params)
            self._teacher = self._devices.put(found)

    def _check_stage(self, state: update.SceneState) -> None:
        if self._config.policy_steps and state.stage != "flow":
            raise errors.ConfigError(
                f"policy_steps={self._config.policy_steps} needs a run that begins with its second "
                "stage: give --import-state a trained pipeline"
            )

    def _source(self, judging: judges.Judges) -> pool.Source:
        """Returns what brings scenes: drawn, or painted by the teacher or by the run itself."""
        config = self._config
        # Captions alone are made so fast that two processes are enough.
        workers = min(config.data_workers, 2) if config.learns_samples else config.data_workers
        # A run that goes on draws other scenes than those that it has seen.
        first = self._number * len(config.sizes)
        drawn = chunks.Chunks(self._maker, first=first, num_workers=workers)
        if not config.learns_samples:
            return pool.Drawn(drawn, self._devices)
        shape = self._networks.pipeline.latent_shape
        if self._teacher is None:
            return policy.Samples(
                drawn, self._own_sample, judging, shape, self._devices,
                group=config.policy_group, seed=config.seed, step=self._number,
            )  # fmt: skip
        return reflow.Pairs(
            drawn,
            functools.partial(self._programs.sample, self._teacher),
            judging,
            shape,
            self._devices,
            chunk=config.chunk_scenes,
            tries=config.teacher_tries,
            seed=config.seed,
            step=self._number,
        )

    def _own_sample(
        self, size: sampling.Size, noise: sampling.Noise, ids: chunks.Ids, lens: chunks.Lens
    ) -> tuple[jax.Array, sampling.Pictures | None]:
        # The next step consumes these arrays, but only after what is dispatched here.
        return self._programs.sample(self._state.average, size, noise, ids, lens)

    def _encode_with(self, params: recipe.Params) -> pool.Encode:
        own = {path: jnp.copy(array) for path, array in params.items()}  # steps consume theirs
        return lambda chunk: {pool.LATENTS: self._programs.encode(own, chunk[pool.PICTURES])}

    def _write_sheet(self, sheet: evaluate.Pictures, name: str) -> None:
        PIL.Image.fromarray(sheet).save(self._output_dir / f"{name}.png")
