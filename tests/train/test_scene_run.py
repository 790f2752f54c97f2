"""A tiny run of the image recipe on CPU: both stages learn, and the engine serves its export."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden_images as golden
from support import image_launches, tiny_scenes

from jdllm import errors
from jdllm.device import devices
from jdllm.models.images import pixels
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import loaded
from jdllm.runner import model_runner
from jdllm.runner.image import kind
from jdllm.scheduler.rows.image import buckets
from jdllm.train import __main__, checkpoints, recipes
from jdllm.train.scenes import networks, objectives, pool

# A run compiles 60 s long; `test_scene_training.py` has the parts.
pytestmark = pytest.mark.campaign

SIZE, TOKENS = (64, 64), 32
CAPTIONS = ("a red circle", "Draw a small blue ring above a green star on a white background.")
# Both compute in float32; the trainer multiplies by one-hot rows and runs captions with the rest.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_scenes.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model_path, tmp_path_factory):
    """Returns the folder of a run of both stages, which also exported its state."""
    folder = tmp_path_factory.mktemp("scenes")
    words = tiny_scenes.arguments(model_path, folder)
    encoded = pool.ScenePool.encode

    def encode(self, function):
        encoded(self, function)
        view = self.view(SIZE)
        np.save(folder / "latents.npy", np.asarray(view.arrays["latents"][: view.count], "f"))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool.ScenePool, "encode", encode)
        assert __main__.main([*words, "--export-state", str(folder / "state")]) == 0
    return folder


@pytest.fixture(scope="module")
def served(run):
    folder = pipeline_folder.read(run / "pipeline")
    model = loaded.load(folder, "float32", devices.facts(), show_progress=False)
    return folder, model


def curve(folder):
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


def test_both_stages_learn_and_are_measured(run):
    lines = curve(run)
    vae = [line["loss"] for line in lines if "kl" in line]
    flow = [line["loss"] for line in lines if "loss" in line and "kl" not in line]
    assert len(vae) == len(flow) == 4
    assert vae[-1] < vae[0] and flow[-1] < flow[0]
    assert lines[-1].keys() >= {"accuracy@1", "accuracy@2"}
    assert (run / "reconstructions.png").is_file() and (run / "flow-40.png").is_file()


def test_the_export_is_a_pipeline_of_normalised_latents(run, served):
    folder, model = served
    vae = folder.models["vae"]
    state = checkpoints.import_parts(run / "state")
    assert vae.config.scaling_factor == pytest.approx(float(state.average[networks.FACTOR]))
    assert vae.config.shift_factor == pytest.approx(float(state.average[networks.SHIFT]))
    assert {one.stored_dtype for one in folder.models.values()} == {"bfloat16"}
    for path, array in model.params.items():
        want = state.average[path].astype(jnp.bfloat16).astype(jnp.float32)
        assert np.array_equal(array, want), path


def test_the_flow_learns_latents_of_mean_zero_and_variance_one(run):
    latents = np.load(run / "latents.npy")
    # They were measured on some of them, and are kept in bfloat16.
    assert len(latents) >= 16 and abs(latents.mean()) < 0.05
    assert latents.std() == pytest.approx(1, abs=0.05)


def test_a_run_begins_with_the_weights_of_an_exported_pipeline(run, model_path, tmp_path, served):
    _, model = served
    words = tiny_scenes.arguments(model_path, tmp_path)
    config = recipes.load(tiny_scenes.RECIPE, words[words.index("--set") + 1 :])
    weights = recipes.build(config, tmp_path).weights_of(run / "pipeline")
    state = checkpoints.import_parts(run / "state")
    assert weights.step == 0 and weights.params.keys() == state.params.keys()
    for path, array in weights.params.items():
        want = np.asarray(state.average[path].astype(jnp.bfloat16).astype(jnp.float32))
        is_number = path in (networks.FACTOR, networks.SHIFT)
        assert np.allclose(array, state.average[path] if is_number else want, rtol=1e-6), path


def trainer_of(run, tmp_path, model):
    """Returns the trainer's networks, and the served weights as it holds them."""
    trained = networks.build(run / "pipeline", tmp_path / "copy", "float32")
    config = model.pipeline.parts.configs["vae"]
    numbers = {networks.SHIFT: config.shift_factor, networks.FACTOR: config.scaling_factor}
    average = checkpoints.import_parts(run / "state").average
    return trained, average | model.params | {k: jnp.float32(v) for k, v in numbers.items()}


def test_the_engine_makes_the_trainers_pictures(run, served, tmp_path):
    folder, model = served
    steps, rows = 3, len(CAPTIONS)
    config = kind.ImageKindConfig(num_slots=512, num_entries=256, max_pixels=64**2, max_tokens=64)
    runner = model_runner.ModelRunner(
        model.params, kind.ImageKind(model.pipeline, config), device=devices.facts()
    )
    step = golden.step_bucket(SIZE, rows, tokens=TOKENS)
    decode = golden.decode_bucket(SIZE, rows=rows)
    encode = golden.encode_bucket(rows, TOKENS)
    runner.compile((encode, golden.begin_bucket(SIZE), step, decode))
    shape = (rows, *model.pipeline.latent_shape(*SIZE))
    noise = np.asarray(jax.random.normal(jax.random.key(3), shape))
    requests = [golden.ask(size=SIZE, steps=steps, latents=one) for one in noise]
    ids, lens = np.zeros((rows, TOKENS), np.int32), np.zeros(rows, np.int32)
    for i, (request, caption) in enumerate(zip(requests, CAPTIONS)):
        found = folder.tokenizers["tokenizer"].encode(caption, max_sequence_length=512).ids
        request.prompt_ids, ids[i, : len(found)], lens[i] = list(found), found, len(found)
    device = golden.Device(runner=runner)
    entered = device.enter(*requests, rows=rows, tokens=TOKENS)
    for _ in range(steps):
        device.step(*entered, bucket_rows=rows, tokens=TOKENS)
    finals = [
        buckets.DecodeRow(request=row.request, stay=row.stay, step=steps, is_final=True)
        for row in entered
    ]
    pictures = [row.product for row in device.launch(decode, finals).rows]

    trained, params = trainer_of(run, tmp_path, model)
    schedule = json.loads((tiny_scenes.SHIPPED / "scheduler/scheduler_config.json").read_text())
    sigmas = image_launches.statically_shifted_levels(schedule["shift"], steps)
    x = jnp.asarray(noise)
    for sigma, next_sigma in zip(sigmas, sigmas[1:]):
        levels = jnp.full(rows, sigma)
        x = x + (next_sigma - sigma) * objectives.velocities(trained, params, x, levels, ids, lens)
    mine = np.asarray(pixels.to_uint8(objectives.decoded(trained, params, x)))
    for own, picture in zip(mine, pictures, strict=True):
        assert np.abs(own.astype(int) - picture).max() <= 1


def test_the_loss_is_that_of_the_served_velocity(run, served, tmp_path):
    _, model = served
    trained, params = trainer_of(run, tmp_path, model)
    shape = (2, *model.pipeline.latent_shape(*SIZE))
    latents = jax.random.normal(jax.random.key(1), shape)
    ids = jnp.tile(jnp.arange(TOKENS), (2, 1))
    lens, sigma = jnp.array([9, 20]), jnp.array([0.9, 0.3])
    got = objectives.velocities(trained, params, latents, sigma, ids, lens)
    captions = model.pipeline.encode(model.params, ids, lens)
    want = model.pipeline.predict(model.params, latents, sigma, captions, lens, None, SIZE)
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_a_run_goes_on_from_its_checkpoint_and_from_exported_weights(run, model_path, tmp_path):
    words = tiny_scenes.arguments(model_path, run, num_steps=50)
    assert __main__.main(words) == 0
    assert curve(run)[-1]["step"] == 50
    assert [line["step"] for line in curve(run) if "loss" in line][-2:] == [45, 50]

    words = tiny_scenes.arguments(model_path, tmp_path, num_steps=46)
    assert __main__.main([*words, "--import-state", str(run / "state")]) == 0
    lines = curve(tmp_path)
    assert lines[-1]["step"] == 46 and not any("kl" in line for line in lines)
    one, two = (f / "pipeline" / "vae" / "config.json" for f in (run, tmp_path))
    assert one.read_text() == two.read_text()


def test_weights_of_another_model_and_an_unknown_recipe_are_refused(run, tmp_path, capfd):
    model = tiny_scenes.write_model(tmp_path / "model")
    file = model / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layers": 2}))
    words = tiny_scenes.arguments(model, tmp_path / "run")
    assert __main__.main([*words, "--import-state", str(run / "state")]) == 2
    assert "transformer.layers.1.attention.norm_k.weight is missing" in capfd.readouterr().err
    with pytest.raises(errors.ConfigError, match="recipe='sceens'"):
        recipes.load(tiny_scenes.RECIPE, ["recipe=sceens"])
