"""What is FLUX.1's alone: two texts, guidance, dev and schnell; runs are tested with all."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_flux as golden
from support import published_pipelines
from support.image_launches import NEGATIVE, PROMPTS

from jdllm import errors
from jdllm.models.images import flux as transformer
from jdllm.pipelines import flux, interface
from jdllm.runner.image.kind import ImageKind
from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows.image import buckets

GOLDEN, CLIP_IDS = golden.GOLDEN, golden.CLIP_IDS
NAMES = {"p0": PROMPTS[0], "p1": PROMPTS[1], "p2": PROMPTS[2], "neg": NEGATIVE}
ATOL_TEXT = 5e-5  # of the makers of the arrays
ATOL_LATENTS = 6e-4  # that of test_golden_runs.py
ATOL_ALONE = 5e-5  # launches of other sizes round differently


def guidance(scales, true_scales):
    zeros = jnp.zeros(len(scales))
    return interface.Guidance(
        guidance_scale=jnp.asarray(scales),
        true_cfg_scale=jnp.asarray(true_scales),
        cfg_truncation=zeros,
        cfg_normalization=zeros,
    )


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("name", NAMES)
def test_a_caption_is_clips_ids_and_then_t5s(name, length):
    text = golden.arrays("text")
    expected = [*text[f"{name}/clip_ids"], *text[f"{name}/t5_ids{length}"]]
    assert list(GOLDEN.ids_of(NAMES[name], length)) == expected


def silu(x):
    return x / (1 + np.exp(-x))


def test_captions_are_what_the_transformer_makes_of_both_texts():
    model, text = GOLDEN.pipeline(), golden.arrays("text")
    weights = golden.tensors("transformer")
    names = ("p2", "p0", "p1")
    ids = np.full((3, CLIP_IDS + 80), 7, np.int32)
    for row, name in zip(ids, names, strict=True):
        row[: CLIP_IDS + 64] = GOLDEN.ids_of(NAMES[name], 64)
    lens = np.full(3, CLIP_IDS + 64, np.int32)
    kept = jax.jit(model.pipeline.encode)(model.params, ids, lens)
    shapes = model.pipeline.caption_shapes(CLIP_IDS + 80)
    for found, shape in zip(jax.tree.leaves(kept), jax.tree.leaves(shapes), strict=True):
        assert found.shape[1:] == shape.shape and found.dtype == shape.dtype
        assert np.isfinite(found).all()

    def layer(x, name):
        return x @ weights[f"{name}.weight"].T.astype(np.float64) + weights[f"{name}.bias"]

    for i, name in enumerate(names):
        tokens = layer(text[f"{name}/t5_embeds"], "context_embedder")
        np.testing.assert_allclose(kept.text[i, :64], tokens, atol=2 * ATOL_TEXT)
        hidden = silu(layer(text[f"{name}/pooled"], "time_text_embed.text_embedder.linear_1"))
        vector = layer(hidden, "time_text_embed.text_embedder.linear_2")
        np.testing.assert_allclose(kept.pooled[i], vector, atol=2 * ATOL_TEXT)


def test_a_negative_prompt_is_weighed_without_any_limit():
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)
    scales = (1.5, 4.0, 0.0)
    model = GOLDEN.pipeline().pipeline
    found = model.guide(positive, negative, jnp.ones(3), guidance((3.5, 1.0, 7.0), scales))
    assert found.dtype == jnp.float32
    for row, scale in enumerate(scales):
        expected = scale * positive[row].astype(np.float64) + (1 - scale) * negative[row]
        np.testing.assert_allclose(found[row], expected, atol=1e-5)


@pytest.mark.campaign
def test_texts_of_unequal_lengths_share_a_launch():
    """Pads of a text count, those of its launch do not: each is the golden run of its length."""
    size = golden.SQUARE
    wanted = (("g3.5_len512", 1), ("g3.5", 1), ("g3.5", 2), ("g3.5", 0))
    asks = [
        GOLDEN.ask(PROMPTS[j], size=size, latents=GOLDEN.initial(size, j), **GOLDEN.runs[run])
        for run, j in wanted
    ]
    device = GOLDEN.device()
    products = device.finish(*device.enter(*asks), output="latent")
    for (run, j), latents in zip(wanted, products, strict=True):
        expected = GOLDEN.steps_of(size, run, f"p{j}")[3, 0]
        np.testing.assert_allclose(latents, expected, atol=ATOL_LATENTS)
    assert np.abs(products[0] - products[1]).max() > 0.1


@pytest.mark.campaign
def test_rows_of_a_launch_have_their_own_scales():
    """The golden run beside rows of other scales; a guided row has both of its own."""
    size = golden.SQUARE
    latents = GOLDEN.initial(size, 2)
    options = [
        {"guidance_scale": 3.5, "true_cfg_scale": 2.0},
        {"guidance_scale": 1.0, "true_cfg_scale": 2.0},
        {"guidance_scale": 3.5, "true_cfg_scale": 1.0},
    ]
    asks = [
        GOLDEN.ask(PROMPTS[2], size=size, latents=latents, negative=NEGATIVE, **one)
        for one in options
    ]
    device = GOLDEN.device()
    products = device.finish(*device.enter(*asks), output="latent")
    guided, plain = (GOLDEN.steps_of(size, run, "p2")[3, 0] for run in ("g3.5_truecfg2", "g3.5"))
    np.testing.assert_allclose(products[0], guided, atol=ATOL_LATENTS)
    assert np.abs(products[1] - guided).max() > 0.1
    # A scale of 1 leaves nothing of the negative prompt.
    np.testing.assert_allclose(products[2], plain, atol=ATOL_LATENTS)


def test_a_launch_of_padding_is_finite():
    """Padding rows have captions of one token, which ends within CLIP's."""
    model, (height, width) = GOLDEN.pipeline(), golden.SQUARE
    kind = ImageKind(model.pipeline, GOLDEN.config)
    tokens = CLIP_IDS + 64
    for bucket in (
        buckets.EncodeBucket(rows=1, tokens=tokens),
        buckets.ModulateBucket(rows=1, num_passes=2),
        buckets.StepBucket(rows=1, tokens=tokens, height=height, width=width, is_guided=False),
    ):
        program = kind.program(bucket)
        empty = ScheduleBatch(rows=(), bucket=bucket)
        inputs = program.inputs(empty, interrupts.shapes())
        assert bucket.name == "modulate" or (inputs.lens < CLIP_IDS).all()
        memory = kind.create_memory()
        parts = {name: memory[name] for name in program.uses}
        _, outputs = jax.jit(program.step)(model.params, parts, inputs)
        assert not outputs.is_invalid.any()


def of_schnell(**request_defaults) -> flux.FluxPipeline:
    """Returns the golden pipeline without an embedding of guidance."""
    whole = GOLDEN.pipeline().pipeline.parts
    config = dataclasses.replace(whole.configs["transformer"], guidance_embeds=False)
    graphdef, _ = transformer.COMPONENT.abstract(config, jnp.dtype("float32"))
    parts = dataclasses.replace(
        whole,
        graphdefs={**whole.graphdefs, "transformer": graphdef},
        configs={**whole.configs, "transformer": config},
        request_defaults=request_defaults,
    )
    return flux.FluxPipeline.build(parts)


@pytest.mark.campaign
def test_schnell_reads_no_scale():
    pipeline, size = of_schnell(), golden.SQUARE
    params = {
        path: array
        for path, array in GOLDEN.pipeline().params.items()
        if "guidance_embedder" not in path
    }
    kept = pipeline.caption_shapes(CLIP_IDS + 8)
    captions = jax.tree.map(lambda one: jnp.ones((2, *one.shape), one.dtype), kept)
    latents, sigma = jnp.asarray([GOLDEN.initial(size, 0)] * 2), jnp.array([0.6, 0.6])
    lens, scales = jnp.full(2, CLIP_IDS + 8), guidance([3.5, 7.0], [1.0, 1.0])
    modulation = pipeline.modulation.make(params, sigma, captions, scales)
    found = pipeline.predict(
        params, latents, sigma, captions, lens, scales, size, modulation=modulation
    )
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found).mean() > 0.1


def test_a_folder_cannot_give_schnell_a_scale():
    assert of_schnell(num_inference_steps=2).defaults.num_inference_steps == 2
    with pytest.raises(errors.ConfigError, match="guidance_scale=2.0 is no option"):
        _ = of_schnell(guidance_scale=2.0).defaults


@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_the_published_sizes_are_a_dummy(name):
    published = published_pipelines.read(f"flux-1-{name}")
    # Two layers of 256 and 3072 to 3072 embed the scale.
    embedder = 256 * 3072 + 3072 + 3072 * 3072 + 3072
    assert published.num_parameters == {
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "transformer": 11_901_408_320 - (embedder if name == "schnell" else 0),
        "vae": 49_545_475,
    }
    tokenizer = published.pipeline.prompt_tokenizer(published.folder.tokenizers)
    ids = tokenizer.encode("a", max_sequence_length=4).ids
    # The end token of CLIP is its last id, and also its pad; those of T5 are 1 and 0.
    assert ids == (97, *[49_407] * 76, 100, 1, 0, 0)


def test_every_launch_of_the_published_sizes_has_shapes():
    published = published_pipelines.read("flux-1-dev")
    published.check_launches(CLIP_IDS + 128, max_tokens=CLIP_IDS + 512)


def test_facts_of_the_published_sizes():
    dev, schnell = (
        published_pipelines.read(f"flux-1-{name}").pipeline for name in ("dev", "schnell")
    )
    for pipeline in (dev, schnell):
        assert pipeline.size_multiple == 16 and pipeline.prefix_tokens == CLIP_IDS
        assert pipeline.latent_shape(1024, 512) == (64 * 32, 64)
        shapes = pipeline.caption_shapes(CLIP_IDS + 64)
        assert (shapes.text.shape, shapes.pooled.shape) == ((64, 3072), (3072,))
        assert (shapes.text.dtype, shapes.pooled.dtype) == (jnp.bfloat16, jnp.float32)
        defaults = pipeline.defaults
        assert (defaults.height, defaults.width, defaults.true_cfg_scale) == (1024, 1024, 1.0)
        assert defaults.max_sequence_length == defaults.longest_sequence_length
    assert (dev.defaults.num_inference_steps, dev.defaults.guidance_scale) == (28, 3.5)
    assert (schnell.defaults.num_inference_steps, schnell.defaults.guidance_scale) == (4, None)
    assert (dev.max_caption_tokens, schnell.max_caption_tokens) == (512, 256)
    # Dev shifts its levels the more, the larger the image; schnell has them evenly.
    small, large = dev.sigmas(4, 256, 256), dev.sigmas(4, 1024, 1024)
    assert (small[1:4] < large[1:4]).all() and small[2] > 0.5
    np.testing.assert_allclose(schnell.sigmas(4, 1024, 1024), [1, 0.75, 0.5, 0.25, 0], atol=1e-7)
