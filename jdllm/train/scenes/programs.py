"""The compiled programs of an image run, one for each size of picture.

All are compiled from the beginning of the run on, in threads and in the order in which the run
needs them, so that the accelerator seldom waits for a program.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.models.images import pixels
from jdllm.train.recipe import Params
from jdllm.train.scenes import chunks, objectives, pool, sampling, update
from jdllm.train.scenes.config import SceneConfig
from jdllm.train.scenes.devices import Devices
from jdllm.train.scenes.networks import LATENTS_DTYPE, Networks
from jdllm.train.scenes.sampling import Size

logger = logging.getLogger(__name__)

THREADS = 10
# The libraries choose their kernels unasked: there are thirty programs, and trying kernels out, in
# one thread at a time, would take longer than a run.
_GPU_OPTIONS = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": "False",
}


class Programs:
    """Programs by what they do, compiled in `threads`; the first call of one waits for it."""

    def __init__(
        self,
        networks: Networks,
        config: SceneConfig,
        devices: Devices,
        state: update.SceneState,
        teacher: Params | None,
        empty: chunks.Caption,
        threads: concurrent.futures.Executor,
    ):
        self._networks, self._config, self._empty = networks, config, empty
        self._devices, self._threads = devices, threads
        has_vae_stage = state.stage == "vae"
        rows = -(-config.eval_problems // len(config.shapes))
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        compile_ = self._compile
        self._steps: dict[tuple[str, Size], Any] = {}
        self._encodes, self._samplers, self._denoises, self._decodes = {}, {}, {}, {}
        if has_vae_stage:
            for size in config.shapes:
                of_vae, held = update.part(state, "vae"), self._held(size, pool.PICTURES)
                self._steps["vae", size] = compile_(self._vae_step, of_vae, held, count, scalar)
        for size in config.shapes:
            if not config.learns_samples:
                pictures = self._rows(size, config.chunk_scenes, pool.PICTURES)[pool.PICTURES]
                self._encodes[size] = compile_(self._encode, state.params, pictures)
            else:
                wanted = self._rows(size, config.chunk_scenes, pool.NOISE)
                of_rows = (wanted[name] for name in (pool.NOISE, pool.IDS, pool.LENS))
                painter = state.average if teacher is None else teacher
                self._samplers[size] = compile_(self._sampler(size), painter, *of_rows)
        names = (
            pool.LATENTS,
            *((pool.NOISE,) if teacher is not None else ()),
            *((pool.ADVANTAGE,) if config.policy_steps else ()),
        )
        for size in config.shapes:
            of_flow, held = update.part(state, "flow"), self._held(size, *names)
            self._steps["flow", size] = compile_(self._flow_step, of_flow, held, count, scalar)
        ids = jax.ShapeDtypeStruct((rows, config.caption_tokens), jnp.int32)
        lens = jax.ShapeDtypeStruct((rows,), jnp.int32)
        self._captions = compile_(
            self._caption, state.params, *(_with_rows(2 * rows, one) for one in (ids, lens))
        )
        # Each row's caption, then the empty one as often.
        captions = jax.eval_shape(
            self._caption, state.params, *(_with_rows(2 * rows, one) for one in (ids, lens))
        )
        both = _with_rows(2 * rows, lens)
        level = jax.ShapeDtypeStruct((rows,), jnp.float32)
        for size in config.shapes:
            latents = jax.ShapeDtypeStruct((rows, *self._latent_shape(size)), jnp.float32)
            self._denoises[size] = compile_(
                self._denoise, state.params, latents, level, level, captions, both, scalar
            )
            self._decodes[size] = compile_(self._decode, state.params, latents)

    def wait_for(self, stage: str) -> None:
        """Returns when all steps of a stage are compiled."""
        for (of_stage, _), program in self._steps.items():
            if of_stage == stage:
                program.result()

    def step(
        self, stage: str, state: update.SceneState, view: pool.View, rate: float
    ) -> tuple[update.SceneState, update.Metrics]:
        """Takes a step of a stage; the state is consumed."""
        program = self._steps[stage, view.size].result()
        new, metrics = program(
            update.part(state, stage), view.arrays, np.int32(view.count), np.float32(rate)
        )
        return update.whole(state, new), metrics

    def encode(self, params: Params, pictures: jax.Array) -> jax.Array:
        """Returns the pipeline's latents of a chunk of pictures, in the dtype of rings.

        A run that learns samples has no such program.
        """
        return self._encodes[pictures.shape[1:3]].result()(params, pictures)

    def sample(
        self, params: Params, size: Size, noise: sampling.Noise, ids: chunks.Ids, lens: chunks.Lens
    ) -> tuple[jax.Array, sampling.Pictures | None]:
        """Returns latents of a chunk with a teacher's weights or own ones; pictures for judges."""
        return self._samplers[size].result()(params, noise, ids, lens)

    def captions(
        self, params: Params, ids: chunks.Ids, lens: chunks.Lens
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what the pipeline keeps of captions and then, as often, of the empty one.

        The second array is the lengths of all of them.
        """
        all_ids, all_lens = sampling.with_empty(jnp.asarray(ids), jnp.asarray(lens), self._empty)
        return self._captions.result()(params, all_ids, all_lens), all_lens

    def denoise(self, size: Size, *arguments: Any) -> jax.Array:
        """Takes one Euler step; see `_denoise`."""
        return self._denoises[size].result()(*arguments)

    def decode(self, size: Size, params: Params, latents: jax.Array) -> jax.Array:
        """Returns pictures of 8 bits."""
        return self._decodes[size].result()(params, latents)

    def _compile(self, function: Callable[..., Any], *shapes: Any) -> Any:
        donated = 0 if isinstance(shapes[0], update.SceneState) else ()
        whole = self._devices.whole
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=whole)
        shapes = self._devices.shapes(shapes)
        options: Any = _GPU_OPTIONS if jax.default_backend() == "gpu" else None

        def compiled() -> Any:
            began = time.monotonic()
            program = jitted.lower(*shapes).compile(compiler_options=options)
            name = function.__name__.lstrip("_")
            logger.info("%s is compiled (%.0f s)", name, time.monotonic() - began)
            return program

        return self._threads.submit(compiled)

    def _latent_shape(self, size: Size) -> tuple[int, ...]:
        return self._networks.pipeline.latent_shape(*size)

    def _held(self, size: Size, *names: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a ring."""
        config = self._config
        places = pool.places_of(config.pool_scenes, config.turns, config.chunk_scenes)
        return self._rows(size, places, *names)

    def _rows(self, size: Size, rows: int, *names: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns captions, and beside them what is named."""
        latents = jax.ShapeDtypeStruct((rows, *self._latent_shape(size)), LATENTS_DTYPE)
        pictures = jax.ShapeDtypeStruct((rows, *size, 3), jnp.uint8)
        known = {
            pool.PICTURES: pictures,
            pool.LATENTS: latents,
            pool.NOISE: latents,
            pool.ADVANTAGE: jax.ShapeDtypeStruct((rows,), jnp.float32),
        }
        width = self._config.train_caption_tokens
        return {name: known[name] for name in names} | {
            pool.IDS: jax.ShapeDtypeStruct((rows, width), jnp.int32),
            pool.LENS: jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    # What is compiled

    def _vae_step(self, state, arrays, count, rate):
        key, rows = self._key(state), self._config.vae_batch_size
        batch = pool.draw(jax.random.fold_in(key, 0), arrays, count, rows)
        batch = self._devices.split(batch)

        def loss(params: Params):
            return objectives.vae_loss(
                self._networks, self._config, params, batch[pool.PICTURES], key
            )

        return update.apply(self._config, state, "vae", loss, rate)

    def _flow_step(self, state, arrays, count, rate):
        key, rows = self._key(state), self._config.batch_size
        batch = pool.draw(jax.random.fold_in(key, 0), arrays, count, rows)
        batch = self._devices.split(batch)
        latents = batch[pool.LATENTS].astype(jnp.float32)
        ids, lens = batch[pool.IDS], batch[pool.LENS]
        draws = jax.random.uniform(jax.random.fold_in(key, 1), (rows,))
        is_dropped = draws < self._config.caption_dropout
        ids = jnp.where(is_dropped[:, None], self._empty.padded(ids.shape[1]), ids)
        lens = jnp.where(is_dropped, self._empty.length, lens)

        key_level, key_noise = (jax.random.fold_in(key, i) for i in (2, 3))
        if pool.NOISE in batch:
            noise = batch[pool.NOISE].astype(jnp.float32)
        else:
            noise = jax.random.normal(key_noise, latents.shape)

        def loss(params: Params):
            of_rows = (noise, ids, lens, key_level)
            if pool.ADVANTAGE not in batch:
                return objectives.flow_loss(self._networks, params, latents, *of_rows)
            return objectives.policy_loss(
                self._networks, params, state.average, latents, batch[pool.ADVANTAGE], *of_rows,
                trust=self._config.policy_trust,
            )  # fmt: skip

        return update.apply(self._config, state, "flow", loss, rate)

    def _key(self, state: update.SceneState) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self._config.seed), state.step)

    def _encode(self, params, pictures):
        pictures = self._devices.split(pictures)
        return objectives.clean_latents(self._networks, params, pictures).astype(LATENTS_DTYPE)

    def _sampler(self, size: Size):
        config = self._config

        def sample(params, noise, ids, lens):
            noise, ids, lens = self._devices.split((noise, ids, lens))
            latents = sampling.sample(
                self._networks, params, size, noise, ids, lens,
                empty=self._empty,
                steps=config.sample_steps,
                guidance=config.sample_guidance,
            ).astype(LATENTS_DTYPE)  # fmt: skip
            if not config.judges_samples:
                return latents, None
            return latents, self._decode(params, latents.astype(jnp.float32))

        return sample

    def _caption(self, params, ids, lens):
        return sampling.captions(self._networks, params, ids, lens)

    def _denoise(self, params, latents, sigma, next_sigma, captions, lens, scale):
        """Returns `x + (next sigma - sigma) * velocity`, as a launch of the engine does."""
        velocity = sampling.guided_velocity(
            self._networks, params, latents, sigma, captions, lens, scale
        )
        return latents + (next_sigma - sigma)[:, None, None, None] * velocity

    def _decode(self, params, latents):
        return pixels.to_uint8(objectives.decoded(self._networks, params, latents))


def _with_rows(rows: int, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)
