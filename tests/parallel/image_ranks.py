"""Image pipelines over ranks, on virtual CPU devices: the images are those of one device.

`test_sharding.py` runs this file in a process with eight of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    golden_flux,
    golden_images,
    golden_pipelines,
    golden_qwen_image,
    image_engine,
    marks,
    step_cache_oracle,
)
from support.image_launches import (
    PROMPTS,
    begin_bucket,
    decode_bucket,
    encode_bucket,
    step_bucket,
)
from support.shards import assert_same_bits, shards_by_device

import jdllm
from jdllm.device import devices, sharding
from jdllm.models import loading, random_weights
from jdllm.models.images import flux, qwen_image, split
from jdllm.models.images.quantization import quantize, read_as
from jdllm.models.split import Placement
from jdllm.pipelines import loaded
from jdllm.runner import model_runner
from jdllm.runner.image import kind, sizes
from jdllm.runner.launch import over_mesh

ATOL_LATENTS = 6e-4  # that of `pipelines/test_golden_runs.py`
ROWS = 2
campaign, long = pytest.mark.campaign, pytest.mark.long
of_each = pytest.mark.parametrize(
    "golden",
    marks.every(3, golden_pipelines.PIPELINES),
    ids=lambda golden: golden.name,
)


def mesh_of(tp):
    return sharding.make_mesh(tp, jax.local_devices())


@functools.cache
def over(golden, tp):
    return loaded.load(
        golden.folder(), "auto", devices.facts(tp), show_progress=False, mesh=mesh_of(tp)
    )


@functools.cache
def runner_over(golden, tp):
    model = over(golden, tp)
    return model_runner.ModelRunner(
        model.params, kind.ImageKind(model.pipeline, golden.config), device=devices.facts(tp)
    )


def with_programs(runner, *buckets):
    runner.compile([bucket for bucket in buckets if not runner.has_program(bucket)])
    return runner


@pytest.mark.parametrize(
    ("golden", "tp", "run", "prompts"),
    [
        (golden_images.GOLDEN, 2, "g0", (1, 2)),
        pytest.param(golden_images.GOLDEN, 2, "g2.5", (2,), marks=campaign),
        pytest.param(golden_flux.GOLDEN, 2, "g3.5", (1, 2), marks=long),
        pytest.param(golden_flux.GOLDEN, 2, "g3.5_truecfg2", (2,), marks=campaign),
        pytest.param(golden_qwen_image.GOLDEN, 2, "nocfg", (1, 2), marks=long),
        pytest.param(golden_qwen_image.GOLDEN, 2, "cfg4", (1, 2), marks=campaign),
    ],
)
def test_golden_runs_over_ranks(golden, tp, run, prompts):
    """Against diffusers, with the tolerance of one device; prompts differ in length."""
    size, options = golden.sizes[0], golden.runs[run]
    asked = [
        golden.ask(PROMPTS[j], size=size, latents=golden.initial(size, j), **options)
        for j in prompts
    ]
    runner = with_programs(
        runner_over(golden, tp),
        encode_bucket(ROWS, golden.tokens),
        *golden.modulate_buckets,
        begin_bucket(size),
        step_bucket(size, ROWS, is_guided="negative" in options, tokens=golden.tokens),
        decode_bucket(size),
    )
    device = golden.device(runner=runner)
    rows = device.enter(*asked, rows=ROWS)
    for after in zip(*[golden.steps_of(size, run, f"p{j}") for j in prompts], strict=True):
        device.step(*rows, bucket_rows=ROWS)
        for row, latents in zip(rows, after, strict=True):
            np.testing.assert_allclose(device.latents(row), latents[0], atol=ATOL_LATENTS)
    for j, image in zip(prompts, device.decode(*rows), strict=True):
        pixels = golden.pixels_of(size, run, f"p{j}")
        assert pixels is None or np.abs(image.astype(int) - pixels[0]).max() <= 1
    assert_same_bits(runner._memory)


# Numbers of the transformer that are split, from the sizes of its config.json. Z-Image has 3 layers
# and two refiners, each with 4 products of dim x dim and 3 of dim x width. The others have streams
# (2 in a double block, 1 in a single) with 12 products of dim x dim and biases of 7 dims.
SPLIT_NUMBERS = {
    "z_image": 5 * (4 * 64 * 64 + 3 * 64 * 170),
    "flux": (2 * 2 + 2) * (12 * 64 * 64 + 7 * 64),
    "qwen_image": 2 * 2 * (12 * 64 * 64 + 7 * 64),
}


@pytest.mark.parametrize("tp", [2])
@of_each
def test_each_rank_holds_its_part_of_the_transformer_and_all_else(golden, tp):
    model, folder = over(golden, tp), golden.folder()
    whole = golden.pipeline().params
    assert model.params.keys() == whole.keys()
    for path, array in model.params.items():
        name, _, own = path.partition(".")
        held = shards_by_device(array)
        assert sorted(held) == list(range(tp))
        config = folder.models[name].config
        how = split.cuts(config, {own: whole[path]}, tp)[own]
        for rank in range(tp):
            expected = np.asarray(whole[path])
            if how is not None:
                expected = sharding.cut(expected, how, rank, tp)[None]
            np.testing.assert_array_equal(held[rank], expected, err_msg=path)
    all_bytes = golden.pipeline().weight_bytes(on_host=False)
    saved = 4 * SPLIT_NUMBERS[golden.name] * (tp - 1) // tp
    assert model.weight_bytes(on_host=False) == all_bytes - saved
    assert sum(sizes.component_bytes(folder, "float32", tp).values()) == all_bytes - saved


# Two sums for each stream of a block, one for a single block of FLUX.1; captions go through the
# context refiner of Z-Image, and nobody reads the text after the last block of Qwen-Image.
SUMS = {"z_image": (2, 2 * 4), "flux": (0, 2 * 2 * 2 + 2), "qwen_image": (0, 2 * 2 * 2 - 2)}


@of_each
def test_launches_for_gpus_sum_after_attention_and_feed_forward_alone(golden):
    runner, size = runner_over(golden, 2), golden.sizes[0]

    def sums(bucket):
        found = runner._executables.trace(bucket, runner._params, runner._memory)
        text = found.traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.all_gather" not in text and "all_to_all" not in text
        return text.count("stablehlo.all_reduce")

    captions = sums(encode_bucket(ROWS, golden.tokens))
    steps = sums(step_bucket(size, ROWS, is_guided=True, tokens=golden.tokens))
    assert (captions, steps) == SUMS[golden.name]
    assert sums(decode_bucket(size)) == 0


@campaign
def test_quantised_weights_are_the_parts_of_those_of_one_device():
    """Some are cut along their scales, others across."""
    folder, tp = golden_images.GOLDEN.folder().models["transformer"], 2
    whole, parts = (
        folder.load("float32", quantization="fp8", show_progress=False, mesh=mesh).params
        for mesh in (None, mesh_of(tp))
    )
    assert whole.keys() == parts.keys()
    for path in (path for path in whole if path.endswith(".values")):
        stem = path.removesuffix(".values")
        how = split.cuts(folder.config, {stem: whole[path]}, tp)[stem]
        values, scale = np.asarray(whole[path]), np.asarray(whole[f"{stem}.scale"])
        held, scales = (shards_by_device(parts[f"{stem}.{one}"]) for one in ("values", "scale"))
        for rank in range(tp):
            expected = sharding.cut(values, how, rank, tp)[None]
            np.testing.assert_array_equal(held[rank].view(np.uint8), expected.view(np.uint8))
            expected = scale if how.axis else sharding.cut(scale, how, rank, tp)[None]
            np.testing.assert_array_equal(scales[rank], expected)


@campaign
def test_ranks_skip_the_steps_of_a_plain_loop():
    """The blocks run in a conditional: all ranks must take the same side."""
    golden, tp, steps = golden_flux.GOLDEN, 2, 6
    config = dataclasses.replace(golden.config, num_slots=4, num_entries=4, has_step_cache=True)
    golden, size = dataclasses.replace(golden, config=config), golden.sizes[0]
    model = over(golden, tp)
    runner = model_runner.ModelRunner(
        model.params, kind.ImageKind(model.pipeline, config), device=devices.facts(tp)
    )
    with_programs(
        runner,
        encode_bucket(ROWS, golden.tokens),
        *golden.modulate_buckets,
        begin_bucket(size),
        step_bucket(size, ROWS, is_cached=True, tokens=golden.tokens),
    )

    def asked(threshold):
        given = {"steps": steps, "latents": golden.initial(size, 1)}
        return golden.ask(PROMPTS[1], size=size, residual_diff_threshold=threshold, **given)

    changes = sorted(step_cache_oracle.run(golden, asked(1e-9)).changes)
    threshold = (changes[1] + changes[2]) / 2
    expected = step_cache_oracle.run(golden, asked(threshold))
    assert 0 < sum(expected.skipped) < steps - 1
    device, skipped = golden.device(runner=runner), []
    (row,) = device.enter(asked(threshold), rows=ROWS)
    for latents in expected.latents:
        (result,) = device.step(row, bucket_rows=ROWS)
        skipped.append(bool(result.num_skipped))
        np.testing.assert_allclose(device.latents(row), latents, atol=ATOL_LATENTS)
    assert skipped == expected.skipped
    assert_same_bits(runner._memory)


# Engines


@campaign
@pytest.mark.parametrize("model", ["z_image", "flux"])
def test_an_engine_over_ranks_makes_the_images_of_one_device(model):
    path = {"z_image": golden_images.PIPELINE, "flux": golden_flux.folder()}[model]
    options = image_engine.OPTIONS | {"model_path": str(path), "enable_step_cache": True}
    asked = {"height": 96, "width": 96, "num_inference_steps": 3, "seed": 5, "use_tqdm": False}
    found = []
    for tp in (1, 2):
        with jdllm.ImageEngine(**options, tp_size=tp) as engine:
            latents = engine.generate(PROMPTS[1:], output_type="latent", **asked)
            cached = engine.generate(PROMPTS[1], residual_diff_threshold=1e-6, **asked)
            assert engine.stats().jit_compiles_total == 0
            assert engine.stats().weight_memory_usage_gb == engine._built.weight_bytes / 1e9
            info = engine.server_info()
            assert info["tp_size"] == info["internal_states"][0]["tp_size"] == tp
            assert [one["id"] for one in info["devices"]] == list(range(tp))
            assert ("all_reduce" in info["kernels"]) == (tp > 1)
            assert_same_bits(engine._built.runner._memory)
            found.append((latents, np.asarray(cached[0]).astype(int), engine._built.weight_bytes))
    (one, cached_one, bytes_of_one), (two, cached_two, bytes_of_two) = found
    np.testing.assert_allclose(two, one, atol=1e-4)
    assert np.abs(cached_one - cached_two).max() <= 1
    assert bytes_of_two == bytes_of_one - 4 * SPLIT_NUMBERS[model] // 2


# Transformers alone, with drawn weights and eight heads


EIGHT_HEADS = {"num_attention_heads": 8, "attention_head_dim": 8, "axes_dims_rope": [4, 2, 2]}
GRID, TEXT, WIDTH = (3, 3), 5, 8  # WIDTH is that of the examples' text embeddings


def flux_velocities(model, x, sigma, texts, lens):
    pooled = jnp.ones((len(x), WIDTH))
    modulations = model.modulate(sigma, 3.5 * sigma, model.embed_pooled(pooled))
    return model.denoise(x, modulations, model.embed_text(texts), lens, GRID)


def qwen_velocities(model, x, sigma, texts, lens):
    return model(x, sigma, texts, lens, GRID)


TRANSFORMERS = {
    "flux": (flux.COMPONENT, flux_velocities, {"num_layers": 1, "num_single_layers": 1}),
    "qwen_image": (qwen_image.COMPONENT, qwen_velocities, {"num_layers": 1}),
}


def drawn(name, tp, quantization=None):
    """Returns (graphdef, parameters) of the example's transformer with one block of each kind."""
    one, _, blocks = TRANSFORMERS[name]
    config = one.read({**one.example, **EIGHT_HEADS, **blocks})
    dtype, quantized = jnp.dtype("float32"), {"quantization": quantization}
    shapes = one.abstract(config, dtype, **quantized)[1]
    read, place = read_as(shapes), None
    if tp > 1:
        place = Placement(cuts=split.cuts(config, read, tp), mesh=mesh_of(tp))
    arrays = random_weights.each(read, place=place)
    params = quantize(arrays, shapes, place)
    return one.abstract(split.local_config(config, tp), dtype, **quantized)[0], params


@functools.cache
def velocities(name, tp, quantization=None):
    """Returns velocities [ranks, B, T, C] of two rows with texts of unequal length."""
    rng = np.random.default_rng(7)
    inputs = (
        rng.normal(size=(2, 9, 16)).astype(np.float32),
        np.array([0.9, 0.2], np.float32),
        rng.normal(size=(2, TEXT, WIDTH)).astype(np.float32),
        np.array([TEXT, 2], np.int32),
    )
    graphdef, params = drawn(name, tp, quantization)

    def forward(params, memory, inputs):
        return memory, TRANSFORMERS[name][1](loading.merge(graphdef, params), *inputs)

    if tp == 1:
        return np.asarray(jax.jit(forward)(params, {}, inputs)[1])[None]
    run = over_mesh.on_every_rank(forward, params, {}, mesh_of(tp))
    out = jax.jit(run)(params, {}, inputs)[1]
    assert_same_bits(out)
    return np.stack(list(shards_by_device(out).values()))


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param("flux", 4, marks=campaign),
        *(
            pytest.param(*one, marks=campaign if one[1] == 8 else long)
            for one in [("flux", 2), ("flux", 8), *(("qwen_image", tp) for tp in (2, 4, 8))]
        ),
    ],
)
def test_velocities_over_ranks_are_those_of_one_device(name, tp):
    expected = velocities(name, 1)
    assert np.std(expected) > 0.1
    found = velocities(name, tp)
    assert len(found) == tp
    np.testing.assert_allclose(found, np.repeat(expected, tp, 0), atol=1e-5 * abs(expected).max())


@campaign
@pytest.mark.parametrize(("name", "tp"), [("flux", 4), ("qwen_image", 8)])
def test_quantised_velocities_over_ranks_are_those_of_one_device(name, tp):
    """But for 8-bit floats that the order of a sum rounds the other way."""
    exact, expected, found = (velocities(name, *one) for one in [(1,), (1, "fp8"), (tp, "fp8")])

    def error(out, wanted):
        return np.linalg.norm(out - wanted) / np.linalg.norm(wanted)

    of_fp8 = error(expected, exact)
    assert of_fp8 > 5e-3
    assert error(found[0], expected[0]) < of_fp8 / 5
