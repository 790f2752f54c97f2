"""Reflow: a teacher's samples, what is refused of teachers, and runs on pairs."""

import dataclasses
import functools
import itertools
import json
import math
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_scenes

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.train import __main__, recipes
from jdllm.train.scenes import chunks, export, networks, objectives, sampling
from jdllm.train.scenes.teacher import read

SIZE, STEPS = (64, 96), 3
TURBO = tiny_scenes.ROOT / "configs" / "train" / "nano-image-turbo.yaml"
EMPTY = chunks.Caption((9, 8, 7))
IDS = jnp.pad(jnp.array([[5, 6, 7, 8], [9, 10, 11, 0]]), ((0, 0), (0, 28)))
LENS = jnp.array([4, 3])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tiny_scenes.build(tmp_path_factory.mktemp("reflow"))


@pytest.fixture(scope="module")
def params(built):
    return tiny_scenes.curved_params(built)


@pytest.fixture(scope="module")
def teacher(built, params):
    """Returns the folder of these weights, in bfloat16."""
    export.write(built, params)
    return built.folder


@pytest.fixture(scope="module")
def velocity(built):
    return jax.jit(functools.partial(objectives.velocities, built))


# Pairs


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_a_sample_is_what_euler_steps_make_of_noise(built, params, velocity, scale):
    sample = functools.partial(
        sampling.sample, built, params, SIZE, empty=EMPTY, steps=STEPS, guidance=scale
    )
    noise = jax.random.normal(jax.random.key(3), (2, *built.pipeline.latent_shape(*SIZE)))
    noise = noise.astype(jnp.bfloat16)
    made = jax.jit(sample)(noise, IDS, LENS)

    x = np.asarray(noise, np.float32)
    none = np.tile(EMPTY.padded(32), (2, 1)), np.full(2, EMPTY.length)
    sigmas = built.pipeline.sigmas(STEPS, *SIZE)
    for sigma, next_sigma in itertools.pairwise(sigmas):
        own, empty = (
            np.asarray(velocity(params, x, np.full(2, sigma), *caption))
            for caption in ((IDS, LENS), none)
        )
        x = x + (next_sigma - sigma) * (own + scale * (own - empty))
    # The velocities count, and guidance does.
    assert np.abs(x - noise).mean() > 0.1 and np.abs(own - empty).mean() > 0.01
    np.testing.assert_allclose(made, x, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_mean_square_of_a_pairs_velocities(built, params, velocity):
    key = jax.random.key(5)
    shape = (2, *built.pipeline.latent_shape(*SIZE))
    latents, noise = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    loss = jax.jit(functools.partial(objectives.flow_loss, built))
    got, _ = loss(params, latents, noise, IDS, LENS, key)
    sigma = np.asarray(objectives.noise_levels(key, 2, built.schedule.shift))
    level = sigma[:, None, None, None]
    predicted = velocity(params, latents + level * (noise - latents), sigma, IDS, LENS)
    error = np.asarray(predicted, np.float64) - (noise - latents)
    assert float(got) == pytest.approx(np.mean(error**2), rel=1e-4)


# The teacher


def test_a_teachers_text_encoder_and_transformer_have_the_compute_dtype(built, params, teacher):
    narrow = {
        path: jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16)
        for path, shape in built.shapes.items()
    }
    found = read(dataclasses.replace(built, shapes=narrow), str(teacher), params)
    assert found.keys() == params.keys()
    for path, array in found.items():
        is_cast = path.startswith(("text_encoder.", "transformer."))
        assert array.dtype == (jnp.bfloat16 if is_cast else jnp.float32), path
        kept = params[path].astype(jnp.bfloat16 if path in narrow else jnp.float32)
        assert np.array_equal(array, kept), path


def test_a_run_of_the_first_stage_has_no_teacher(built, params, teacher):
    unfixed = params | {networks.FACTOR: jnp.float32(0)}
    with pytest.raises(errors.ConfigError, match="teacher='.*second stage: give --import-state"):
        read(built, str(teacher), unfixed)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "teacher='nowhere' is neither a folder nor a bundled model"),
        ("jdllm-nano", "teacher='jdllm-nano': .*model_index.json does not exist"),
        ("jdllm-nano-image", "teacher='jdllm-nano-image': its text_encoder is not that of the run"),
    ],
)
def test_what_is_no_pipeline_like_the_runs_is_refused(built, params, name, said):
    with pytest.raises(errors.ConfigError, match=said):
        read(built, name, params)


def test_a_teacher_with_other_token_ids_is_refused(built, params, teacher, tmp_path):
    other = shutil.copytree(teacher, tmp_path / "other")
    file = other / "tokenizer" / "tokenizer.json"
    values = json.loads(file.read_text())
    ids = values["model"]["vocab"]
    ids["Ġred"], ids["Ġblue"] = ids["Ġblue"], ids["Ġred"]
    file.write_text(json.dumps(values))
    with pytest.raises(errors.ConfigError, match=r"teacher=.*tokenizer\.json has other ids"):
        read(built, str(other), params)


@pytest.mark.parametrize(
    "path",
    [networks.FACTOR, networks.SHIFT, "vae.decoder.conv_in.bias", "vae.encoder.conv_in.bias"],
)
def test_a_teacher_with_another_autoencoder_is_refused(built, params, teacher, path):
    own = params | {path: params[path] * 1.01 + 0.01}
    with pytest.raises(errors.ConfigError, match=f"its autoencoder is not .*1 arrays.*{path}"):
        read(built, str(teacher), own)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("teacher_steps=0", "teacher_steps=0 must be at least 1"),
        ("teacher_guidance=-1", "teacher_guidance=-1.0 must be a finite"),
        ("teacher_guidance=.inf", "teacher_guidance=inf must be a finite"),
        ("teacher_guidance=.nan", "teacher_guidance=nan must be a finite"),
        ("teacher_tries=-1", "teacher_tries=-1 must be at least 0"),
        ("teacher=3", "teacher=3 must be of type str | None"),
    ],
)
def test_a_wrong_option_is_named(change, named):
    with pytest.raises(errors.ConfigError) as refused:
        recipes.load(TURBO, [change])
    assert named in str(refused.value)


def test_the_shipped_recipe_fits_the_bundled_model_and_its_sizes(tmp_path):
    own = recipes.load(TURBO).teacher
    assert own == "runs/nano-image-more/pipeline"
    assert f"--import-state {own}" in TURBO.read_text()
    assert own.removesuffix("/pipeline") in TURBO.with_name("nano-image.yaml").read_text()
    config = recipes.load(TURBO, ["teacher=jdllm-nano-image"])
    assert recipes.load(TURBO, ["teacher=null", "teacher_tries=0"]).teacher is None
    built = networks.build(tiny_scenes.ROOT / config.model_path, tmp_path, config.compute_dtype)
    weights = networks.read_params(built, source.bundled_model(config.teacher))
    teacher = read(built, config.teacher, weights)
    ids = jax.ShapeDtypeStruct((config.chunk_scenes, config.train_caption_tokens), jnp.int32)
    lens = jax.ShapeDtypeStruct((config.chunk_scenes,), jnp.int32)
    for size in config.shapes:
        sample = functools.partial(
            sampling.sample, built, teacher, size,
            empty=EMPTY, steps=config.teacher_steps, guidance=config.teacher_guidance,
        )  # fmt: skip
        shape = (config.chunk_scenes, *built.pipeline.latent_shape(*size))
        noise = jax.ShapeDtypeStruct(shape, networks.LATENTS_DTYPE)
        assert jax.eval_shape(sample, noise, ids, lens).shape == shape


# A run


def test_an_export_with_a_scale_changes_that_of_requests_alone(built, params, teacher, tmp_path):
    file = "generation_config.json"
    assert json.loads((teacher / file).read_text())["guidance_scale"] == 2.0
    other = shutil.copytree(teacher, tmp_path / "other")
    export.write(dataclasses.replace(built, folder=other), params, guidance_scale=0)
    want = json.loads((teacher / file).read_text()) | {"guidance_scale": 0}
    assert json.loads((other / file).read_text()) == want


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, None),
        ({"teacher": "one"}, 0),
        ({"teacher": "one", "caption_dropout": 0}, 0),
        # The sampler of the second round has no guidance, and so has its student.
        ({"teacher": "one", "teacher_guidance": 0, "caption_dropout": 0}, 0),
        ({"teacher": "one", "teacher_guidance": 0, "caption_dropout": 0.1}, None),
    ],
)
def test_guidance_is_the_default_only_of_who_can_have_it(monkeypatch, tmp_path, changes, scale):
    model = tiny_scenes.write_model(tmp_path / "model")
    words = tiny_scenes.arguments(model, tmp_path, **({"vae_steps": 0} | changes))
    settings = recipes.load(tiny_scenes.RECIPE, words[words.index("--set") + 1 :])
    recipe = recipes.build(settings, tmp_path)
    written = []
    monkeypatch.setattr(export, "write", lambda *_, guidance_scale: written.append(guidance_scale))
    recipe.export(types.SimpleNamespace(average={}), tmp_path)
    assert written == [scale]


@pytest.mark.campaign  # its programs are compiled twice
def test_a_run_with_a_teacher_learns_its_pairs_goes_on_and_needs_no_guidance(
    teacher, tmp_path, capfd
):
    model, folder = teacher.parent / "model", tmp_path / "run"

    def run(num_steps, *words):
        words_ = tiny_scenes.arguments(
            model, folder, num_steps=num_steps, vae_steps=0, teacher=str(teacher),
            teacher_steps=4, caption_dropout=0, learning_rate=2e-3,
        )  # fmt: skip
        assert __main__.main([*words_, *words]) == 0
        lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
        return lines, [line["loss"] for line in lines if "loss" in line]

    lines, losses = run(30, "--import-state", str(teacher))
    # The paths of its own pairs are nearly straight to it; with other noise the loss is above 1.
    assert len(losses) == 6 and losses[-1] < losses[0] < 0.6
    assert not any("kl" in line for line in lines) and "accuracy@2" in lines[-1]
    said = capfd.readouterr().err
    assert "sample is compiled" in said and "encode is compiled" not in said
    scale = json.loads((folder / "pipeline" / "generation_config.json").read_text())
    assert scale == {"num_inference_steps": 8, "guidance_scale": 0}
    lines, losses = run(40)
    assert lines[-1]["step"] == 40 and len(losses) == 8 and math.isfinite(losses[-1])


@pytest.mark.campaign
def test_a_run_learns_the_right_samples_of_the_bundled_model(tmp_path):
    words = tiny_scenes.arguments(
        tiny_scenes.SHIPPED, tmp_path, num_steps=4, vae_steps=0, teacher="jdllm-nano-image",
        teacher_steps=4, teacher_tries=3, caption_dropout=0, batch_size=4, log_every=1,
        compute_dtype="bfloat16", learning_rate=1e-6, eval_problems=2, eval_steps=[1],
        data_workers=1,
    )  # fmt: skip
    assert __main__.main([*words, "--import-state", "jdllm-nano-image"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    # Most of its own paths are nearly straight to it, but some bend since it learnt from verdicts:
    # the median is 0.34. With other noise it is 0.62.
    assert len(losses) == 4 and np.median(losses) < 0.4


@pytest.mark.campaign
def test_a_run_with_a_teacher_needs_imported_weights(teacher, tmp_path, capfd):
    model = teacher.parent / "model"
    words = tiny_scenes.arguments(model, tmp_path, vae_steps=0, teacher=str(teacher))
    assert __main__.main(words) == 2
    assert "needs a run that begins with its second stage" in capfd.readouterr().err
