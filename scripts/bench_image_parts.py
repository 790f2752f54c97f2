"""Times the parts of an image pipeline with random weights, under held load.

    python scripts/bench_image_parts.py --pipeline configs/z-image-turbo \
        --transformer 512x1 512x4 512x12 1024x1 1024x4 --vae 512x1 512x4 --text 64x1 512x4

A point is SIDExBATCH (pixels) or TOKENSxBATCH; an image with a negative prompt counts as two. Steps
feed each other as in sampling. Where modulation is made before steps (FLUX.1, Qwen-Image), one is
timed with a window of it, as it is served (`transformer`), and with a product of its own (`with
product`), and so is the launch that makes the windows (`modulate`). The device first runs for
`--warm-s`, so that it is at the clock that it can hold. Then at least `--timed-s` are measured,
three times; the median is printed. F790 and F650 are the FLOPs at 790 TFLOP/s (a short burst) and
at 650 (what an H200 holds at its power limit). `--profile` lists kernels. With `--tp-size` the
transformer is split over GPUs, and the FLOPs are those of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernel_profile
from jax.sharding import Mesh

import pallas_kernels
from jdllm.bench import tables
from jdllm.device import devices, sharding
from jdllm.models.images import (
    autoencoder_kl_qwen_image,
    clip_text,
    flux_config,
    qwen_image_config,
    z_image_config,
)
from jdllm.models.images.autoencoder import config
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import interface, loaded
from jdllm.pipelines.folder import LoadedComponent
from jdllm.runner.image import sizes, state
from jdllm.runner.launch import executables, over_mesh

SCOPES = ("attention", "feed_forward")
STEP = -0.01  # of sigma: the latents stay finite over thousands of steps
TOP_KERNELS = 14
SHORT_CAPTION = 64  # tokens of a caption where captions are not padded
MOST_IDS = 1000  # of the ids that encoders read
SPLIT_LINES = ("transformer", "with product")  # over GPUs; of the others each computes all
Point = tuple[int, int]
# Of one row, from the component's config: of a transformer and its tokens of image and caption, of
# an autoencoder and the sides of latents.
FLOPS: dict[str, Callable[[Any, int, int], int]] = {
    "ZImageTransformer2DModel": z_image_config.flops,
    "FluxTransformer2DModel": flux_config.flops,
    "QwenImageTransformer2DModel": qwen_image_config.flops,
    "AutoencoderKL": config.flops,
    "AutoencoderKLQwenImage": autoencoder_kl_qwen_image.flops,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A pipeline without weights, one loaded component of it, and its parameters for both."""

    pipeline: interface.Pipeline
    model: LoadedComponent
    params: dict[str, jax.Array]
    flops: Callable[[Any, int, int], int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What is timed; the last argument of a step is replaced by its result."""

    point: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--pipeline", type=pathlib.Path, default=pathlib.Path("configs/z-image-turbo")
    )
    parser.add_argument("--transformer", type=parse_point, nargs="*", default=[], metavar="SIDExB")
    parser.add_argument("--vae", type=parse_point, nargs="*", default=[], metavar="SIDExB")
    parser.add_argument(
        "--text",
        type=parse_point,
        nargs="*",
        default=[],
        metavar="TOKENSxB",
        help="of each encoder",
    )
    add_timing_flags(parser)
    parser.add_argument("--quantization", choices=("fp8",), help="as for jdllm serve")
    parser.add_argument(
        "--mixed-captions",
        action="store_true",
        help="rows have a fifth, two, three fifths or all of the caption tokens, in turn",
    )
    parser.add_argument("--as-served", action="store_true", help="no line `with product`")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs of the transformer's steps")
    options = parser.parse_args()
    if options.tp_size > 1:
        devices.prepare_several()
    mesh = sharding.make_mesh(options.tp_size, devices.every())
    folder = pipeline_folder.read(options.pipeline, load_format="dummy")
    pipeline, _ = loaded.without_weights(
        folder,
        jnp.dtype(options.dtype),
        quantization=options.quantization,
        tp_size=options.tp_size,
    )
    caption = options.caption_tokens or default_caption(pipeline)
    kind = jax.devices()[0].device_kind
    tables.say(f"# {options.pipeline}, {caption} caption tokens, {options.tp_size} x {kind}")
    tables.say("part             point      ms   F790   F650  of F650  temp GB  compile s")
    texts = [name for name in folder.models if name.startswith("text_encoder")]
    if options.mixed_captions and pipeline.pads_captions:
        parser.error(f"{options.pipeline} pads all captions to one length")
    is_mixed = options.mixed_captions
    step = functools.partial(transformer, caption_tokens=caption, is_mixed=is_mixed)
    steps = [("transformer", step)]
    if pipeline.modulation is not None:
        if not options.as_served:
            steps.append(("with product", functools.partial(step, has_window=False)))
        steps.append(("modulate", functools.partial(modulate, caption_tokens=caption)))
    for name, builds, points in (
        ("transformer", steps, options.transformer),
        ("vae", [("vae", vae)], options.vae),
        *((name, [(name, functools.partial(text, name=name))], options.text) for name in texts),
    ):
        if not points:
            continue
        model = folder.models[name].load(
            options.dtype, quantization=options.quantization, mesh=mesh
        )
        params = {interface.prefix_of(name) + path: array for path, array in model.params.items()}
        count = FLOPS.get(folder.models[name].component.class_names[0])
        for point in points:
            for line, build in builds:
                work = build(Measured(pipeline, model, params, count), point)
                if mesh is not None:
                    work = over(mesh, work, is_split=line in SPLIT_LINES)
                measure(line, work, options)
        for array in model.params.values():
            array.delete()


def add_timing_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--caption-tokens",
        type=int,
        help="of the transformer's captions (default: 64, or the most where captions are padded)",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--timed-s", type=float, default=1.0)


def default_caption(pipeline: interface.Pipeline) -> int:
    return pipeline.defaults.max_sequence_length if pipeline.pads_captions else SHORT_CAPTION


def transformer(
    of: Measured,
    point: Point,
    *,
    caption_tokens: int,
    has_window: bool = True,
    is_mixed: bool = False,
) -> Work:
    """Returns one step of images; the guidance of all is 3.5, where there is such an option.

    Modulation comes from windows if it is made before steps, unless `has_window` is False. Captions
    are padded to `caption_tokens`, and have as many of their own unless they are mixed.
    """
    side, batch = point
    key = jax.random.key(0)
    captions = captions_of(of.pipeline, batch, caption_tokens)
    shares = jnp.resize(jnp.array([1.0, 0.2, 0.4, 0.6] if is_mixed else [1.0]), (batch,))
    own = jnp.maximum(jnp.int32(shares * caption_tokens), 1)
    lens = of.pipeline.prefix_tokens + own
    sigma, guidance, rows = 0.5 * jnp.ones((batch,)), guidance_of(batch), jnp.arange(batch)
    windows = windows_of(of.pipeline, batch) if has_window else None

    def step(params: Any, captions: Any, lens: Any, windows: Any, latents: Any) -> Any:
        modulation = None
        if windows is not None:
            modulation = windows.read(rows, 0 * rows)
        elif of.pipeline.modulation is not None:
            modulation = of.pipeline.modulation.make(params, sigma, captions, guidance)
        return latents + STEP * of.pipeline.predict(
            params, latents, sigma, captions, lens, guidance, (side, side), modulation=modulation
        )

    latents = jax.random.normal(key, (batch, *of.pipeline.latent_shape(side, side)))
    assert of.flops is not None, "of a transformer"
    flops = of.flops(of.model.config, of.pipeline.image_tokens(side, side), caption_tokens)
    arguments = of.params, captions, lens, windows, latents
    return Work(f"{side}x{batch}", step, arguments, batch * flops)


def modulate(of: Measured, point: Point, *, caption_tokens: int) -> Work:
    """Returns the launch that makes the windows of a batch."""
    side, batch = point
    ahead, windows = of.pipeline.modulation, windows_of(of.pipeline, batch)
    assert ahead is not None and windows is not None, "else nothing of it is measured"
    num_steps = jax.tree.leaves(windows)[0].shape[1]
    captions = captions_of(of.pipeline, batch, caption_tokens)
    guidance, rows = guidance_of(batch), jnp.arange(batch)

    def step(params: Any, captions: Any, windows: Any) -> Any:
        first = jax.tree.leaves(windows)[0]
        sigma = jnp.repeat(0.5 + 0 * first.reshape(batch, -1)[:, 0], num_steps)  # needs the last
        of_steps = jax.tree.map(lambda x: jnp.repeat(x, num_steps, axis=0), (captions, guidance))
        made = ahead.make(params, sigma, *of_steps)
        return windows.write(
            rows, jax.tree.map(lambda x: x.reshape(batch, num_steps, *x.shape[1:]), made)
        )

    numbers = ahead.num_bytes // 4
    flops = 2.0 * numbers * of.pipeline.transformer_width * num_steps * batch
    return Work(f"{side}x{batch}", step, (of.params, captions, windows), flops)


def over(mesh: Mesh, work: Work, *, is_split: bool) -> Work:
    """Returns work on every device of a mesh, with the FLOPs of each: a part, or the whole."""
    params, *inputs, state = work.arguments

    def on_rank(params: Any, memory: Any, inputs: Any) -> tuple[Any, None]:
        return {"state": work.step(params, *inputs, memory["state"])}, None

    inputs, state = over_mesh.replicated((inputs, state), mesh)
    everywhere = over_mesh.on_every_rank(on_rank, params, {"state": state}, mesh)

    def step(params: Any, *arguments: Any) -> Any:
        return everywhere(params, {"state": arguments[-1]}, list(arguments[:-1]))[0]["state"]

    flops = work.flops / mesh.devices.size if is_split else work.flops
    return dataclasses.replace(work, step=step, arguments=(params, *inputs, state), flops=flops)


def captions_of(pipeline: interface.Pipeline, batch: int, caption_tokens: int) -> Any:
    """Returns random captions of so many tokens behind the prefix."""
    tokens, multiple = pipeline.prefix_tokens + caption_tokens, pipeline.caption_multiple
    shapes = pipeline.caption_shapes(-(-tokens // multiple) * multiple)
    key = jax.random.key(0)
    return jax.tree.map(lambda one: jax.random.normal(key, (batch, *one.shape), one.dtype), shapes)


def guidance_of(batch: int) -> interface.Guidance:
    ones = jnp.ones((batch,))
    return interface.Guidance(
        guidance_scale=3.5 * ones,
        true_cfg_scale=ones,
        cfg_truncation=ones,
        cfg_normalization=0 * ones,
    )


def windows_of(pipeline: interface.Pipeline, batch: int) -> state.SlotModulations | None:
    """Returns windows of a caption for each row; None if steps make all modulation."""
    ahead, windows = pipeline.modulation, sizes.windows(pipeline, (1,), batch, None)
    if ahead is None or windows is None:
        return None
    return state.SlotModulations.empty(batch, 1, windows.steps, ahead.shapes)


def vae(of: Measured, point: Point) -> Work:
    side, batch = point

    def step(params: Any, latents: Any) -> Any:
        images = of.pipeline.decode(params, latents, (side, side))
        return latents + 1e-6 * jnp.mean(images)  # the next decode needs this one

    shape = of.pipeline.latent_shape(side, side)
    latents = jax.random.normal(jax.random.key(0), (batch, *shape))
    h = side // of.model.config.scale
    assert of.flops is not None, "of an autoencoder"
    flops = of.flops(of.model.config, h, h)
    return Work(f"{side}x{batch}", step, (of.params, latents), batch * flops)


def text(of: Measured, point: Point, *, name: str) -> Work:
    """Returns an encoding; CLIP reads as many tokens as it has positions, whatever the point."""
    tokens, batch = point
    is_clip = isinstance(of.model.config, clip_text.ClipTextConfig)
    if is_clip:
        tokens = of.model.config.max_positions
    given = () if is_clip else (jnp.full((batch,), tokens, jnp.int32),)

    def step(params: Any, ids: Any) -> Any:
        found = of.pipeline.parts.module(name, params).encode(ids, *given)
        is_positive = found.reshape(batch, -1).sum(axis=1) > 0  # the next encoding needs this one
        return (ids + is_positive[:, None]) % MOST_IDS

    layers = sum(a.size for path, a in of.model.params.items() if "embedding" not in path)
    ids = jnp.zeros((batch, tokens), jnp.int32)
    return Work(f"{tokens}x{batch}", step, (of.params, ids), 2.0 * layers * tokens * batch)


def measure(name: str, work: Work, options: argparse.Namespace) -> None:
    """Compiles, warms, times and prints one point."""
    timed = time_steps(work.step, work.arguments, options)
    f790, f650 = (1e3 * work.flops / (rate * 1e12) for rate in (790, 650))
    tables.say(
        f"{name:14s} {work.point:>7s} {timed.ms:7.2f} {f790:6.1f} {f650:6.1f} "
        f"{timed.ms / f650:8.2f} {timed.temp_gb:8.2f} {timed.compile_s:8.1f}"
    )
    if options.profile:
        found = kernel_profile.profile(timed.run_three, timed.hlo, SCOPES, 3)
        tables.say(
            f"  busy {found.busy_ms:.2f} ms, {found.launches} kernels; " + str(found.by_scope)
        )
        for scope, kernel, kernel_ms, launches in found.by_kernel[:TOP_KERNELS]:
            tables.say(f"  {kernel_ms:8.3f} ms {launches:4d} x {scope:14s} {kernel[:70]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A step's time and needs; `run_three` runs three more of them."""

    ms: float
    temp_gb: float
    compile_s: float
    hlo: str
    run_three: Callable[[], None]


def time_steps(
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: argparse.Namespace,
    *,
    period: int = 1,
) -> Timed:
    """Compiles, warms and times steps, each of which gets the result of the one before it.

    What is timed is a multiple of `period` steps: of so many each may cost something else.
    """
    began = time.perf_counter()
    with pallas_kernels.record_choices() as choices:
        lowered = jax.jit(step, donate_argnums=len(arguments) - 1).lower(*arguments)
    compiled = lowered.compile(compiler_options={**executables.fp8_options(choices)})
    compile_s = time.perf_counter() - began
    *fixed, state = arguments

    def run(count: int, state: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        for _ in range(count):
            state = compiled(*fixed, state)
        jax.block_until_ready(state)
        return time.perf_counter() - began, state

    few = period * math.ceil(3 / period)
    seconds, state = run(few, state)
    seconds, state = run(few, state)
    per_step = seconds / few
    _, state = run(max(1, int(options.warm_s / per_step)), state)
    times = []
    for _ in range(3):
        count = period * max(2, math.ceil(options.timed_s / (period * per_step)))
        seconds, state = run(count, state)
        times.append(seconds / count)
    memory, held = compiled.memory_analysis(), [state]

    def run_three() -> None:
        held[0] = run(3, held[0])[1]

    return Timed(
        ms=1e3 * statistics.median(times),
        temp_gb=memory.temp_size_in_bytes / 1e9 if memory else 0.0,
        compile_s=compile_s,
        hlo=compiled.as_text() or "",
        run_three=run_three,
    )


def parse_point(text: str) -> Point:
    side, _, batch = text.partition("x")
    return int(side), int(batch)


if __name__ == "__main__":
    main()
