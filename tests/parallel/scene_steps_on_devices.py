"""Steps of an image run that devices share are those of one device."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_scenes

from jdllm.train import recipes
from jdllm.train.scenes import chunks, devices, networks, pool, programs, update

pytestmark = pytest.mark.campaign

SIZE, MANY = (64, 64), 4
EMPTY = chunks.Caption((1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("scenes")
    tiny_scenes.write_model(found / "model")
    return found


class Run:
    """Programs of a stage on some devices, and a state and scenes for them."""

    def __init__(self, folder, stage, count, *, teacher=False):
        words = tiny_scenes.arguments(folder / "model", folder, dp_size=count, teacher_steps=2)
        self.config = recipes.load(tiny_scenes.RECIPE, words[words.index("--set") + 1 :])
        built = networks.build(folder / "model", folder / "pipeline", "float32")
        params = networks.init_params(built, 0)
        if stage == "flow":
            params |= {networks.FACTOR: jnp.ones(())}
        self.stage, self.devices = stage, devices.Devices(count)
        state = update.init(self.config, params, average=params, step=0)
        self.state = self.devices.put(state)
        # Steps consume their state.
        self.teacher = self.devices.put(jax.tree.map(jnp.copy, params)) if teacher else None
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
        noise = {pool.NOISE: latents[::-1]} if self.teacher is not None else {}
        ids = draw.integers(1, 50, (places, self.config.train_caption_tokens), np.int32)
        arrays = known[self.stage] | noise | {pool.IDS: ids, pool.LENS: 3 + ids[:, 0] % 20}
        return pool.View(size=SIZE, arrays=self.devices.put(arrays), count=places)

    def flops(self):
        (program,) = (
            one.result() for (of, _), one in self.programs._steps.items() if of == self.stage
        )
        found = program.cost_analysis()
        return (found[0] if isinstance(found, list) else found)["flops"]


@pytest.mark.parametrize(("stage", "teacher"), [("vae", False), ("flow", False), ("flow", True)])
def test_a_step_that_devices_share_is_that_of_one(folder, stage, teacher):
    found = {}
    for count in (1, MANY):
        run = Run(folder, stage, count, teacher=teacher)
        state = run.state
        for _ in range(2):
            state, metrics = run.programs.step(stage, state, run.view(), 1e-3)
        assert all(len(array.sharding.device_set) == count for array in state.params.values())
        numbers = float(metrics["loss"]), float(metrics["grad_norm"])
        found[count] = run.flops(), *numbers, jax.tree.leaves(state.opt_states)
    flops, loss, norm, moments = found[1]
    part, shared_loss, shared_norm, shared = found[MANY]
    assert part < flops * (1 / MANY + 0.2)  # the optimiser's part is not shared
    assert shared_loss == pytest.approx(loss, rel=1e-4)
    assert shared_norm == pytest.approx(norm, rel=1e-3)
    # Moments, not weights: the steps of weights without gradients follow from rounding alone.
    largest = max(float(np.abs(array).max()) for array in moments if array.ndim)
    for array, other in zip(moments, shared, strict=True):
        np.testing.assert_allclose(other, array, rtol=1e-2, atol=1e-4 * largest)


@pytest.mark.parametrize("teacher", [False, True])
def test_a_chunk_that_devices_share_is_that_of_one(folder, teacher):
    made = []
    for count in (1, MANY):
        run, draw = Run(folder, "flow", count, teacher=teacher), np.random.default_rng(1)
        if teacher:
            noise = draw.standard_normal((16, *run.latent_shape), np.float32)
            ids = draw.integers(1, 50, (16, run.config.train_caption_tokens), np.int32)
            captions = ids, np.arange(3, 19, dtype=np.int32)
            latents, _ = run.programs.sample(SIZE, noise.astype(networks.LATENTS_DTYPE), *captions)
        else:
            pictures = jnp.asarray(draw.integers(0, 256, (16, *SIZE, 3), np.uint8))
            latents = run.programs.encode(run.state.params, pictures)
        assert len(latents.sharding.device_set) == count
        made.append(np.asarray(latents, np.float32))
    assert made[0].std() > 0.1
    np.testing.assert_allclose(made[1], made[0], rtol=2**-7, atol=1e-3)  # a step of bfloat16
