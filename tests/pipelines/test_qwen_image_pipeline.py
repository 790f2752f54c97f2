"""What is Qwen-Image's alone: text, guidance, sizes; whole runs are tested with all pipelines."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_qwen_image as golden
from support import published_pipelines
from support.image_launches import NEGATIVE, PROMPTS

from jdllm.pipelines import interface
from jdllm.runner.image.kind import ImageKind
from jdllm.runner.launch import interrupts
from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.rows.image import buckets

GOLDEN, PREFIX = golden.GOLDEN, golden.PREFIX
ATOL_TEXT = 5e-5  # of the makers of the arrays
ATOL_LATENTS = 6e-4  # that of test_golden_runs.py
# The third begins with a line end, as the text before a prompt ends with one.
TEXTS = {
    "p0": PROMPTS[0],
    "p1": PROMPTS[1],
    "p2": PROMPTS[2],
    "neg": NEGATIVE,
    "newline": "\n a cat",
}


def guidance(*scales: float) -> interface.Guidance:
    zeros = jnp.zeros(len(scales))
    return interface.Guidance(
        guidance_scale=zeros,
        true_cfg_scale=jnp.asarray(scales),
        cfg_truncation=zeros,
        cfg_normalization=zeros,
    )


@pytest.mark.parametrize("limit", [512, 16, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_ids_of_the_goldens(name, limit):
    tokenizer = GOLDEN.folder().tokenizers["tokenizer"]
    found = tokenizer.encode(TEXTS[name], max_sequence_length=limit)
    expected = golden.arrays("text")[f"{name}/ids"].tolist()
    assert list(found.ids) == expected[: PREFIX + limit]
    assert found.num_cut == max(0, len(expected) - PREFIX - limit)


def test_captions_are_the_texts_tokens_without_the_prefix():
    model, text = GOLDEN.pipeline(), golden.arrays("text")
    rows = [text[f"{name}/ids"] for name in ("p2", "p0", "p1")]
    ids = np.full((3, PREFIX + 90), 7, np.int32)
    for row, own in zip(ids, rows):
        row[: len(own)] = own
    lens = np.array([len(row) for row in rows], np.int32)
    kept = jax.jit(model.pipeline.encode)(model.params, ids, lens)
    assert kept.shape == (3, *model.pipeline.caption_shapes(PREFIX + 90).shape)
    assert np.isfinite(kept).all()
    weights = golden.tensors("transformer")
    for row, name in zip(kept, ("p2", "p0", "p1"), strict=True):
        x = text[f"{name}/embeds"].astype(np.float64)
        x /= np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        x = x * weights["txt_norm.weight"] @ weights["txt_in.weight"].T + weights["txt_in.bias"]
        np.testing.assert_allclose(row[: len(x)], x, atol=2 * ATOL_TEXT)


def test_guidance_keeps_the_length_of_every_token():
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)
    positive[1, 2] = negative[1, 2] = 0  # nothing to scale
    scales = (1.5, 4.0, 0.0)
    model = GOLDEN.pipeline().pipeline
    found = np.asarray(model.guide(positive, negative, jnp.ones(3), guidance(*scales)))
    assert found.dtype == np.float32
    for row, scale in enumerate(scales):
        for token in range(5):
            one, other = (x[row, token].astype(np.float64) for x in (positive, negative))
            mixed = other + scale * (one - other)
            if mixed.any():
                mixed *= math.sqrt(sum(one**2)) / math.sqrt(sum(mixed**2))
            np.testing.assert_allclose(found[row, token], mixed, atol=1e-5)


@pytest.mark.campaign
def test_guided_rows_of_one_launch_have_their_own_negative_prompts_and_scales():
    """The batches of which diffusers 0.42.1 mixes up the padding, each row against itself alone."""
    size = golden.SIZES[0]
    wanted = (("cfg4_empty", 2), ("cfg4", 1), ("cfg4_space", 1), ("cfg1.5", 1))
    requests = [
        GOLDEN.ask(PROMPTS[j], size=size, latents=GOLDEN.initial(size, j), **GOLDEN.runs[run])
        for run, j in wanted
    ]
    device = GOLDEN.device()
    products = device.finish(*device.enter(*requests), output="latent")
    for (run, j), latents in zip(wanted, products, strict=True):
        expected = GOLDEN.steps_of(size, run, f"p{j}")[3, 0]
        np.testing.assert_allclose(latents, expected, atol=ATOL_LATENTS)


@pytest.mark.campaign
def test_a_launch_of_padding_is_finite():
    """Padding rows have captions of one token, which ends within the prefix."""
    model, config = GOLDEN.pipeline(), GOLDEN.config
    kind = ImageKind(model.pipeline, config)
    tokens, (height, width) = PREFIX + 16, golden.SIZES[0]
    bucket = buckets.StepBucket(rows=1, tokens=tokens, height=height, width=width, is_guided=True)
    program = kind.program(bucket)
    empty = ScheduleBatch(rows=(), bucket=bucket)
    inputs = program.inputs(empty, interrupts.shapes())
    assert (inputs.lens < PREFIX).all()
    captions = jnp.zeros((1, *model.pipeline.caption_shapes(tokens).shape))
    make = model.pipeline.modulation.make
    velocity = model.pipeline.predict(
        model.params,
        jnp.asarray(GOLDEN.initial(golden.SIZES[0], 0))[None],
        inputs.sigma,
        captions,
        inputs.lens[0],
        inputs.guidance,
        golden.SIZES[0],
        modulation=make(model.params, inputs.sigma, captions, inputs.guidance),
    )
    assert np.isfinite(velocity).all()


def test_the_published_sizes_are_a_dummy():
    published = published_pipelines.read("qwen-image")
    assert published.num_parameters == {
        "text_encoder": 7_070_619_136,
        "transformer": 20_430_401_088,
        "vae": 25_291_955,
    }
    ids = published.folder.tokenizers["tokenizer"].encode("a", max_sequence_length=9).ids
    assert ids[PREFIX:] == (97, 10)


def test_every_launch_of_the_published_sizes_has_shapes():
    published = published_pipelines.read("qwen-image")
    published.check_launches(PREFIX + 64, max_tokens=PREFIX + 1024)


def test_facts_of_the_published_sizes():
    pipeline = published_pipelines.read("qwen-image").pipeline
    assert pipeline.size_multiple == 16
    assert pipeline.latent_shape(1024, 512) == (64 * 32, 64)
    assert pipeline.caption_shapes(PREFIX + 64).shape == (64, 3072)
    # The longest caption stands behind half of the longest side, and there are 4096 positions.
    assert pipeline.max_side // 16 // 2 + pipeline.max_caption_tokens <= 4096
    defaults = pipeline.defaults
    assert (defaults.height, defaults.width, defaults.num_inference_steps) == (1024, 1024, 50)
    assert (defaults.true_cfg_scale, defaults.guidance_scale) == (4.0, None)
    sigmas = pipeline.sigmas(50, 1024, 1024)
    assert sigmas[0] == 1 and sigmas[-1] == 0
    assert sigmas[-2] == pytest.approx(0.02, abs=1e-6)
