"""Image runs whose batches devices share: steps, chunks and whole runs are those of one device."""

import concurrent.futures
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_scenes

from jdllm.train import __main__, recipes
from jdllm.train.scenes import chunks, devices, networks, pool, programs, update

pytestmark = pytest.mark.campaign

SIZE, MANY = (64, 64), 4
EMPTY = chunks.Caption((1, 2))
# Where the latents of steps come from.
DRAWN, TEACHER, OWN = "drawn", "teacher", "own"
OPTIONS = {
    DRAWN: {},
    TEACHER: {"teacher": "any", "teacher_steps": 2, "teacher_tries": 2, "vae_steps": 0},
    OWN: {"policy_steps": 2, "vae_steps": 0, "caption_dropout": 0},
}


@pytest.fixture(autouse=True)
def no_programs_stay():
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("scenes")
    tiny_scenes.write_model(found / "model")
    return found


class Run:
    """Programs of a stage on some devices, and a state and scenes for them."""

    def __init__(self, folder, stage, count, source=DRAWN):
        words = tiny_scenes.arguments(folder / "model", folder, dp_size=count, **OPTIONS[source])
        self.config = recipes.load(tiny_scenes.RECIPE, words[words.index("--set") + 1 :])
        built = networks.build(folder / "model", folder / "pipeline", "float32")
        params = networks.init_params(built, 0)
        if stage == "flow":
            params |= {networks.FACTOR: jnp.ones(())}
        self.stage, self.source, self.devices = stage, source, devices.Devices(count)
        state = update.init(self.config, params, average=params, step=0)
        self.state = self.devices.put(state)
        # Steps consume their state.
        own = self.devices.put(jax.tree.map(jnp.copy, params))
        self.teacher = own if source == TEACHER else None
        threads = concurrent.futures.ThreadPoolExecutor(1)
        self.programs = programs.Programs(
            built, self.config, self.devices, self.state, self.teacher, EMPTY, threads
        )
        self.programs.wait_for(stage)  # before them it compiles what makes chunks
        threads.shutdown(cancel_futures=True)
        self.latent_shape = built.pipeline.latent_shape(*SIZE)

    def view(self):
        draw, places = np.random.default_rng(0), self.config.pool_scenes
        latents = draw.standard_normal((places, *self.latent_shape)).astype(networks.LATENTS_DTYPE)
        known = {
            "vae": {pool.PICTURES: draw.integers(0, 256, (places, *SIZE, 3), np.uint8)},
            "flow": {pool.LATENTS: latents},
        }
        more = {
            DRAWN: {},
            TEACHER: {pool.NOISE: latents[::-1]},
            OWN: {pool.ADVANTAGE: draw.standard_normal(places, np.float32)},
        }
        ids = draw.integers(1, 50, (places, self.config.train_caption_tokens), np.int32)
        captions = {pool.IDS: ids, pool.LENS: 3 + ids[:, 0] % 20}
        arrays = known[self.stage] | more[self.source] | captions
        return pool.View(size=SIZE, arrays=self.devices.put(arrays), count=places)

    def step_flops(self):
        return _flops(self.programs._steps[self.stage, SIZE])

    def chunk_flops(self):
        made = self.programs._encodes if self.source == DRAWN else self.programs._samplers
        return _flops(made[SIZE])


def _flops(future):
    found = future.result().cost_analysis()
    return (found[0] if isinstance(found, list) else found)["flops"]


@pytest.mark.parametrize(
    ("stage", "source"), [("vae", DRAWN), ("flow", DRAWN), ("flow", TEACHER), ("flow", OWN)]
)
def test_a_step_that_devices_share_is_that_of_one(folder, stage, source):
    found = {}
    for count in (1, MANY):
        run = Run(folder, stage, count, source)
        state = run.state
        for _ in range(2):
            state, metrics = run.programs.step(stage, state, run.view(), 1e-3)
        assert all(len(array.sharding.device_set) == count for array in state.params.values())
        numbers = float(metrics["loss"]), float(metrics["grad_norm"])
        found[count] = run.step_flops(), *numbers, jax.tree.leaves(state.opt_states)
    flops, loss, norm, moments = found[1]
    part, shared_loss, shared_norm, shared = found[MANY]
    assert part < flops * (1 / MANY + 0.2)  # the optimiser's part is not shared
    assert shared_loss == pytest.approx(loss, rel=1e-4)
    assert shared_norm == pytest.approx(norm, rel=1e-3)
    # Moments, not weights: the steps of weights without gradients follow from rounding alone.
    largest = max(float(np.abs(array).max()) for array in moments if array.ndim)
    for array, other in zip(moments, shared, strict=True):
        np.testing.assert_allclose(other, array, rtol=1e-2, atol=1e-4 * largest)


@pytest.mark.parametrize("source", [DRAWN, TEACHER, OWN])
def test_a_chunk_that_devices_share_is_that_of_one(folder, source):
    made, flops = [], []
    for count in (1, MANY):
        run, draw = Run(folder, "flow", count, source), np.random.default_rng(1)
        if source == DRAWN:
            pictures = jnp.asarray(draw.integers(0, 256, (16, *SIZE, 3), np.uint8))
            latents = run.programs.encode(run.state.params, pictures)
        else:
            noise = draw.standard_normal((16, *run.latent_shape), np.float32)
            ids = draw.integers(1, 50, (16, run.config.train_caption_tokens), np.int32)
            captions = ids, np.arange(3, 19, dtype=np.int32)
            painter = run.teacher if source == TEACHER else run.state.average
            noise = noise.astype(networks.LATENTS_DTYPE)
            latents, pictures = run.programs.sample(painter, SIZE, noise, *captions)
            assert pictures.shape == (16, *SIZE, 3)
        assert len(latents.sharding.device_set) == count
        made.append(np.asarray(latents, np.float32))
        flops.append(run.chunk_flops())
    assert flops[1] < flops[0] * (1 / MANY + 0.05)
    assert made[0].std() > 0.1
    np.testing.assert_allclose(made[1], made[0], rtol=2**-7, atol=1e-3)  # a step of bfloat16


def test_a_run_that_devices_share_changes_its_stage_and_goes_on_with_one(folder, tmp_path):
    def run(count, **changes):
        words = tiny_scenes.arguments(folder / "model", tmp_path, dp_size=count, **changes)
        assert __main__.main(words) == 0
        return [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]

    lines = run(2, num_steps=30)
    assert lines[-1]["step"] == 30 and "accuracy@2" in lines[-1]
    kinds = ["kl" in line for line in lines if "loss" in line]
    assert kinds == 4 * [True] + 2 * [False]
    assert (tmp_path / "pipeline" / "transformer" / "config.json").is_file()
    lines = run(1, num_steps=40)
    assert lines[-1]["step"] == 40 and np.isfinite([x["loss"] for x in lines if "loss" in x]).all()
