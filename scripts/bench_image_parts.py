"""Times the parts of an image pipeline with random weights, under held load.

    python scripts/bench_image_parts.py --pipeline configs/z-image-turbo \
        --transformer 512x1 512x4 512x12 1024x1 1024x4 --vae 512x1 512x4 --text 64x1 512x4

A point is SIDExBATCH (pixels) or TOKENSxBATCH. Steps feed each other as in sampling. The device
first runs for `--warm-s`, so that it is at the clock that it can hold. Then at least `--timed-s`
are measured, three times; the median is printed. F790 and F650 are the FLOPs at 790 TFLOP/s (a
short burst) and at 650 (what an H200 holds at its power limit). `--profile` lists kernels.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernel_profile

from jdllm.imagegen import pipeline_folder
from jdllm.models import loading
from jdllm.models.images import z_image_config
from jdllm.models.images.autoencoder import config as autoencoder_config

SCOPES = ("attention", "feed_forward")
STEP = -0.01  # of sigma: the latents stay finite over thousands of steps
TOP_KERNELS = 14
Point = tuple[int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--pipeline", type=pathlib.Path, default=pathlib.Path("configs/z-image-turbo")
    )
    parser.add_argument("--transformer", type=_point, nargs="*", default=[], metavar="SIDExB")
    parser.add_argument("--vae", type=_point, nargs="*", default=[], metavar="SIDExB")
    parser.add_argument("--text", type=_point, nargs="*", default=[], metavar="TOKENSxB")
    parser.add_argument("--caption-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--timed-s", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    models = pipeline_folder.read(options.pipeline, load_format="dummy").models
    say("part         point      ms   F790   F650  of F650  temp GB  compile s")
    parts = (("transformer", transformer), ("vae", vae), ("text_encoder", text))
    for (name, build), points in zip(
        parts, (options.transformer, options.vae, options.text), strict=True
    ):
        if not points:
            continue
        model = models[name].load(options.dtype)
        for point in points:
            measure(name, point, *build(model, point, options.caption_tokens), options)
        for array in model.params.values():
            array.delete()


def transformer(
    model: pipeline_folder.LoadedComponent, point: Point, caption_tokens: int
) -> tuple[Callable[..., Any], tuple[Any, ...], float]:
    """Returns (function, its arguments, FLOPs); the last argument is replaced by the result."""
    side, batch = point
    config: z_image_config.ZImageConfig = model.config
    h = side // 8
    lens = jnp.full((batch,), caption_tokens, jnp.int32)
    key = jax.random.key(0)
    width = z_image_config.padded(caption_tokens)
    captions = jax.random.normal(key, (batch, width, config.dim), model.params["x_pad_token"].dtype)

    def step(params: Any, captions: Any, lens: Any, latents: Any) -> Any:
        t = jnp.full((batch,), 0.5)
        return latents + STEP * module(model, params).denoise(latents, t, captions, lens)

    latents = jax.random.normal(key, (batch, config.in_channels, h, h))
    flops = batch * z_image_config.flops(config, (h // 2) ** 2, caption_tokens)
    return step, (model.params, captions, lens, latents), flops


def vae(
    model: pipeline_folder.LoadedComponent, point: Point, _: int
) -> tuple[Callable[..., Any], tuple[Any, ...], float]:
    side, batch = point
    h = side // model.config.scale

    def step(params: Any, latents: Any) -> Any:
        images = module(model, params).decode(latents)
        return latents + 1e-6 * jnp.mean(images)  # the next decode needs this one

    latents = jax.random.normal(jax.random.key(0), (batch, model.config.latent_channels, h, h))
    flops = batch * autoencoder_config.flops(model.config, h, h)
    return step, (model.params, latents), flops


def text(
    model: pipeline_folder.LoadedComponent, point: Point, _: int
) -> tuple[Callable[..., Any], tuple[Any, ...], float]:
    tokens, batch = point
    lens = jnp.full((batch,), tokens, jnp.int32)

    def step(params: Any, ids: Any) -> Any:
        found = module(model, params).encode(ids, lens)
        return (ids + (found[:, :, 0] > 0)) % 1000

    layers = sum(a.size for p, a in model.params.items() if p != "word_embeddings")
    ids = jnp.zeros((batch, tokens), jnp.int32)
    return step, (model.params, ids), 2.0 * layers * tokens * batch


def module(model: pipeline_folder.LoadedComponent, params: Any) -> Any:
    return loading.merge(model.graphdef, params)


def measure(
    name: str,
    point: Point,
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    flops: float,
    options: argparse.Namespace,
) -> None:
    """Compiles, warms, times and prints one point."""
    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=len(arguments) - 1).lower(*arguments).compile()
    compile_s = time.perf_counter() - began
    *fixed, state = arguments

    def run(count: int, state: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        for _ in range(count):
            state = compiled(*fixed, state)
        jax.block_until_ready(state)
        return time.perf_counter() - began, state

    seconds, state = run(3, state)
    seconds, state = run(3, state)
    per_step = seconds / 3
    _, state = run(max(1, int(options.warm_s / per_step)), state)
    times = []
    for _ in range(3):
        count = max(2, int(options.timed_s / per_step))
        seconds, state = run(count, state)
        times.append(seconds / count)
    ms, memory = 1e3 * statistics.median(times), compiled.memory_analysis()
    f790, f650 = (1e3 * flops / (rate * 1e12) for rate in (790, 650))
    temp = memory.temp_size_in_bytes / 1e9 if memory else 0.0
    say(
        f"{name:12s} {point[0]}x{point[1]:<3d} {ms:7.2f} {f790:6.1f} {f650:6.1f} "
        f"{ms / f650:8.2f} {temp:8.2f} {compile_s:8.1f}"
    )
    if options.profile:
        held = [state]

        def once() -> None:
            held[0] = run(3, held[0])[1]

        found = kernel_profile.profile(once, compiled.as_text() or "", SCOPES, 3)
        say(f"  busy {found.busy_ms:.2f} ms, {found.launches} kernels; " + str(found.by_scope))
        for scope, kernel, kernel_ms, launches in found.by_kernel[:TOP_KERNELS]:
            say(f"  {kernel_ms:8.3f} ms {launches:4d} x {scope:14s} {kernel[:70]}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _point(text: str) -> Point:
    side, _, batch = text.partition("x")
    return int(side), int(batch)


if __name__ == "__main__":
    main()
