"""Times denoising steps of which a given share is skipped, with random weights, under held load.

    python scripts/bench_step_cache.py --pipeline configs/z-image-turbo --points 512x1 1024x1 1024x4

What a threshold skips depends on trained weights. So skips are replayed here: all rows of a launch
skip every n-th step, evenly, at each of the `--skip-rates`; rows that skip alone save nothing. The
first line of a point is a step of a server without a step cache. Points, times and loads are those
of `bench_image_parts.py`.
"""

from __future__ import annotations

import argparse
import fractions
import pathlib
from collections.abc import Callable
from typing import Any

import bench_image_parts as parts
import jax
import jax.numpy as jnp

from jdllm.bench import tables
from jdllm.models.images import step_cache
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import interface, registry

RATES = (0.0, 0.25, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--pipeline", type=pathlib.Path, default=pathlib.Path("configs/z-image-turbo")
    )
    parser.add_argument("--points", type=parts.parse_point, nargs="+", metavar="SIDExB")
    parser.add_argument("--skip-rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--guided", action="store_true", help="two forwards for each image")
    parts.add_timing_flags(parser)
    options = parser.parse_args()
    folder = pipeline_folder.read(options.pipeline, load_format="dummy")
    model = folder.models["transformer"].load(options.dtype)
    pipeline = registry.PIPELINES[folder.class_name].build(
        interface.Parts(
            graphdefs={"transformer": model.graphdef},
            configs={name: one.config for name, one in folder.models.items()},
            schedule=folder.schedule,
            dtype=jnp.dtype(options.dtype),
        )
    )
    options.caption_tokens = options.caption_tokens or parts.default_caption(pipeline)
    prefix = interface.prefix_of("transformer")
    params = {prefix + path: array for path, array in model.params.items()}
    tables.say("point      skipped      ms       of no cache  residuals GB  temp GB  compile s")
    for point in options.points:
        plain_ms = None
        for asked in (None, *options.skip_rates):
            # Whole periods are timed: a part of one skips more or less than the rate.
            share = None if asked is None else fractions.Fraction(asked).limit_denominator(100)
            rate, period = (None, 1) if share is None else (float(share), share.denominator)
            step, arguments = build(pipeline, params, point, rate, options)
            held_gb = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[-1][1])) / 1e9
            timed = parts.time_steps(step, arguments, options, period=period)
            plain_ms = plain_ms or timed.ms
            shown = "no cache" if rate is None else f"{100 * rate:.0f} %"
            tables.say(
                f"{point[0]}x{point[1]:<5d} {shown:>8s} {timed.ms:7.2f} "
                f"{timed.ms / plain_ms:16.3f} {held_gb:13.2f} {timed.temp_gb:8.2f} "
                f"{timed.compile_s:10.1f}"
            )


def build(
    pipeline: interface.Pipeline,
    params: interface.Params,
    point: parts.Point,
    rate: float | None,
    options: argparse.Namespace,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns (function, its arguments); the last argument is replaced by the result.

    It is the latents, the residuals and the number of steps so far. A rate of None is a step
    without a cache.
    """
    side, batch = point
    size = side, side
    rows = batch * (1 + options.guided)
    keys = iter(jax.random.split(jax.random.key(0), 3))

    def random(shape: Any) -> jax.Array:
        return jax.random.normal(next(keys), (rows, *shape.shape), shape.dtype)

    captions = parts.captions_of(pipeline, rows, options.caption_tokens)
    latents = random(jax.ShapeDtypeStruct(pipeline.latent_shape(*size), jnp.float32))[:batch]
    shape = pipeline.image_tokens(*size), pipeline.transformer_width
    residuals = None
    if rate is not None:
        of_tokens = jax.ShapeDtypeStruct(shape, pipeline.parts.dtype)
        residuals = step_cache.Residuals(first=random(of_tokens), rest=random(of_tokens))
    lens = jnp.full((rows,), pipeline.prefix_tokens + options.caption_tokens, jnp.int32)
    ones = jnp.ones((rows,), jnp.float32)
    guidance = interface.Guidance(
        guidance_scale=4 * ones,
        true_cfg_scale=4 * ones,
        cfg_truncation=ones,
        cfg_normalization=0 * ones,
    )

    windows, slots = parts.windows_of(pipeline, rows), jnp.arange(rows)

    def step(params: Any, captions: Any, windows: Any, rate: Any, state: Any) -> Any:
        modulation = None if windows is None else windows.read(slots, 0 * slots)
        latents, held, count = state
        cache = None
        if held is not None:
            # Evenly spaced, and the first step of all computes.
            is_skipped = jnp.floor((count + 1) * rate) > jnp.floor(count * rate)
            cache = step_cache.StepCache(held, lambda change: (change < 0) | is_skipped)
        x = jnp.concatenate([latents] * (rows // batch))
        velocity = pipeline.predict(
            params, x, 0.5 * ones, captions, lens, guidance, size, modulation, cache
        )
        if options.guided:
            own, negative = jnp.split(velocity, 2)
            of_image = jax.tree.map(lambda value: value[:batch], guidance)
            velocity = pipeline.guide(own, negative, 0.5 * ones[:batch], of_image)
        kept = None if cache is None else cache.kept
        return latents + parts.STEP * velocity, kept, count + 1

    state = latents, residuals, jnp.zeros((), jnp.int32)
    return step, (params, captions, windows, jnp.float32(rate or 0.0), state)


if __name__ == "__main__":
    main()
