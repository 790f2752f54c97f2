"""Learning from verdicts: advantages, the loss, and runs that become right more often."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_scenes
from train import test_judged_pairs as fakes

from jdllm import errors
from jdllm.train import __main__, recipes
from jdllm.train.scenes import devices, export, judges, objectives, policy, pool

SHIPPED = tiny_scenes.ROOT / "configs" / "train" / "nano-image-policy.yaml"


class World(fakes.World):
    """Judges find a caption right by its number; they read no sample before they are asked."""

    def begun(self, facts, pictures):
        return iter(self.wrong(facts, pictures))


GROUP = 2


def fewer(chunk):
    """Returns the first captions of a chunk: so many that their groups fill one."""
    count = fakes.CHUNK // GROUP
    return chunk and dataclasses.replace(
        chunk, facts=chunk.facts[:count], ids=chunk.ids[:count], lens=chunk.lens[:count]
    )


class Captions(fakes.Late):
    def take(self, *, waits):
        return fewer(super().take(waits=waits))


def samples_of(world, *, captions=None, step=0):
    return policy.Samples(
        captions or Captions(), world.sample, world, lambda *_: fakes.SHAPE,
        devices.Devices(1), group=GROUP, seed=0, step=step,
    )  # fmt: skip


# Of a caption, modulo 8, whether its first and its second sample are right. At the first size three
# of four are, at the other one of four.
RIGHT = {0: (True, True), 1: (True, False), 4: (False, True), 5: (False, False)}


def test_every_caption_comes_with_its_samples_and_what_sets_them_apart():
    world = World(lambda caption, attempt: RIGHT[caption % 8][attempt - 1])
    samples = samples_of(world)
    for number in range(8):
        size, arrays = samples.take(waits=True)
        assert size == fakes.SIZES[number % 2] and len(arrays) == 4
        first = number * fakes.CHUNK
        captions = [first, first, first + 1, first + 1]
        assert arrays[pool.IDS][:, 0].tolist() == captions
        for row, (caption, latents) in enumerate(zip(captions, arrays[pool.LATENTS], strict=True)):
            start = world.starts[caption][row % 2]
            np.testing.assert_array_equal(np.asarray(latents, np.float32), 2 * start)
        # Half a verdict is the mean of groups that disagree.
        want = [0, 0, 0.5, -0.5] if number % 2 == 0 else [-0.5, 0.5, 0, 0]
        want = np.array(want) / np.sqrt(0.25 * 0.75)
        np.testing.assert_allclose(arrays[pool.ADVANTAGE], want, rtol=1e-6)
    noise = np.stack([start for starts in world.starts.values() for start in starts])
    assert noise.std() == pytest.approx(1, abs=0.1)
    assert len({start.tobytes() for start in noise}) == len(noise)
    samples_of(later := World(lambda *_: True), step=7).take(waits=True)
    assert not np.array_equal(later.starts[0], world.starts[0])


def test_advantages_are_in_deviations_of_the_verdicts_of_late():
    """From chunk to chunk a size's share of right samples changes by a tenth of the new one."""
    shares = np.repeat([0.1, 1, 0.6, 1, 0.5], 10)
    rights = np.random.default_rng(1).random((len(shares), fakes.CHUNK)) < shares[:, None]
    told = iter(rights.ravel())
    samples = samples_of(World(lambda *_: next(told)))
    seen = {size: None for size in fakes.SIZES}
    for number, right in enumerate(rights[:40]):  # some are judged ahead
        _, arrays = samples.take(waits=True)
        size = fakes.SIZES[number % 2]
        share = right.mean() if seen[size] is None else seen[size]
        seen[size] = 0.9 * share + 0.1 * right.mean()
        groups = right.reshape(-1, GROUP).astype(float)
        want = (groups - groups.mean(1, keepdims=True)) / max(np.sqrt(share * (1 - share)), 0.1)
        np.testing.assert_allclose(arrays[pool.ADVANTAGE], want.ravel(), rtol=1e-5)


def test_one_that_does_not_wait_has_what_was_begun():
    captions = Captions()
    samples = samples_of(World(lambda *_: True), captions=captions)
    assert samples.take(waits=False) is not None
    captions.is_ready = False
    begun = captions.number // fakes.CHUNK - 1
    found = [samples.take(waits=False) for _ in range(begun + 2)]
    assert [one is not None for one in found] == [True] * begun + [False] * 2
    assert samples.take(waits=True) is not None


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tiny_scenes.build(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def params(built):
    return tiny_scenes.curved_params(built)


def test_the_loss_has_the_gradients_of_diffusion_nft(built, params):
    """Against its form in the paper, with weights of both signs and a new policy beside the old."""
    rows, most = 4, 4.0
    draw = np.random.default_rng(2)
    shape = (rows, *built.pipeline.latent_shape(64, 64))
    latents, noise = draw.standard_normal((2, *shape)).astype(np.float32)
    advantage = np.array([1.5, -2.0, 0.25, -9.0], np.float32)
    ids = jnp.asarray(draw.integers(1, 50, (rows, 32)), jnp.int32)
    lens, key = jnp.array([4, 9, 6, 5]), jax.random.key(5)
    new = {path: a + 0.01 * draw.standard_normal(a.shape) for path, a in params.items()}
    new = {path: jnp.asarray(a, jnp.float32) for path, a in new.items()}
    sigma = objectives.noise_levels(key, rows, built.schedule.shift)
    level = sigma[:, None, None, None]
    x = (1 - level) * latents + level * noise

    def nft(own):
        old = objectives.velocities(built, params, x, sigma, ids, lens)
        moved = objectives.velocities(built, own, x, sigma, ids, lens) - old

        def error(v):
            clean = x - level * v
            magnitude = jnp.mean(jnp.abs(clean - latents), axis=(1, 2, 3))
            square = jnp.mean(jnp.square(clean - latents), axis=(1, 2, 3))
            return square / jax.lax.stop_gradient(magnitude)

        r = 0.5 + np.clip(advantage / most, -1, 1) / 2
        return jnp.mean(r * error(old + moved) + (1 - r) * error(old - moved))

    def loss(own):
        return objectives.policy_loss(
            built, own, params, latents, advantage, noise, ids, lens, key,
            trust=most,
        )[0]  # fmt: skip

    path = next(path for path in new if path.endswith(".w_out"))
    want, got = (
        jax.jit(jax.grad(lambda array, of=of: of(new | {path: array})))(new[path])
        for of in (nft, loss)
    )
    assert float(jnp.abs(want).max()) > 1e-4
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["teacher=a"], "policy_steps=8 needs vae_steps=0 and no teacher"),
        (["vae_steps=5"], "policy_steps=8 needs vae_steps=0 and no teacher"),
        (["policy_group=1"], "policy_group=1 must be at least 2 and divide chunk_scenes=512"),
        (["policy_group=3"], "policy_group=3 must be at least 2 and divide chunk_scenes=512"),
        (["policy_group=0"], "policy_group=0 must be at least 1"),
        (["policy_steps=-1"], "policy_steps=-1 must be at least 0"),
        (["policy_trust=0"], "policy_trust=0.0 must be a finite number above 0"),
        (["policy_trust=.nan"], "policy_trust=nan must be a finite number above 0"),
        (["caption_dropout=0.1"], "caption_dropout=0.1 must be 0 with policy_steps"),
    ],
)
def test_a_wrong_option_is_named(changes, named):
    with pytest.raises(errors.ConfigError) as refused:
        recipes.load(SHIPPED, changes)
    assert named in str(refused.value)


@pytest.mark.campaign
def test_a_run_comes_to_paint_what_is_found_right(built, params, tmp_path, monkeypatch):
    reds = []  # of each chunk; right is what is redder than most pictures were at first

    def redder(self, facts, pictures):
        del self, facts
        reds.append([picture[:, :, 0].mean() for picture in pictures])
        least = np.median(reds[:4])
        return iter([() if red > least else ("count: 1",) for red in reds[-1]])

    monkeypatch.setattr(judges.Judges, "begun", redder)
    export.write(built, params)
    words = tiny_scenes.arguments(
        built.folder.parent / "model", tmp_path, num_steps=300, vae_steps=0, policy_steps=2,
        caption_dropout=0, optimizer="adamw", learning_rate=1e-3, policy_trust=1.0, batch_size=16,
        steps_per_chunk=1, warmup_steps=1, ema_decay=0.8, decay_share=0.1, eval_steps=[1],
        eval_guidance=[0],
    )  # fmt: skip
    assert __main__.main([*words, "--import-state", str(built.folder)]) == 0
    painted = np.array([of for of in reds if len(of) == 16])  # the others are of the evaluation
    first, last = painted[:40], painted[-40:]
    assert last.mean() > first.mean() + 0.25 * first.std()
    assert (last > np.median(painted[:4])).mean() > (first > np.median(painted[:4])).mean() + 0.05
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert all(line["drift"] >= 0 for line in lines if "loss" in line)
    scale = json.loads((tmp_path / "pipeline" / "generation_config.json").read_text())
    assert scale["guidance_scale"] == 0


@pytest.mark.campaign
def test_a_run_of_own_samples_needs_trained_weights(built, tmp_path, capfd):
    words = tiny_scenes.arguments(
        built.folder.parent / "model", tmp_path, vae_steps=0, policy_steps=2, caption_dropout=0
    )
    assert __main__.main(words) == 2
    assert "policy_steps=2 needs a run that begins with its second stage" in capfd.readouterr().err
