"""The parts of the image recipe: its clock, noise levels, tokens, chunks, pool and size."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from support import tiny_scenes

from jdllm import errors
from jdllm.pipelines import flow_schedule, prompts
from jdllm.tasks.scenes import generator, oracle
from jdllm.train import recipes
from jdllm.train.scenes import chunks, devices, networks, objectives, pool, tokenizer, update

SIZES = ((64, 64), (64, 96))


def config(*changes):
    return recipes.load(tiny_scenes.RECIPE, changes)


# The objectives


def test_noise_levels_are_spread_as_those_of_the_schedule():
    schedule = flow_schedule.FlowSchedule(shift=3.0)
    levels = np.sort(objectives.noise_levels(jax.random.key(0), 64, schedule.shift))
    edges = schedule.sigmas(64, image_tokens=16)[::-1]  # 0, then the shifted 1/64, ..., 1
    assert (levels >= edges[:-1]).all() and (levels <= edges[1:]).all()


def test_measured_latents_have_mean_zero_and_variance_one():
    latents = 3 * jax.random.normal(jax.random.key(0), (4, 8, 8)) + 2
    shift, factor = objectives.measured(latents)
    normal = (latents - shift) * factor
    assert float(normal.mean()) == pytest.approx(0, abs=1e-5)
    assert float(normal.std()) == pytest.approx(1, abs=1e-5)


# Captions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(path, vocab_size=576)
    return path


@pytest.mark.campaign
def test_a_word_is_one_token_wherever_it_stands(folder):
    encode = transformers.AutoTokenizer.from_pretrained(folder).tokenize
    assert encode("Red circle") == encode("red  circle") == ["Ġred", "Ġcircle"]
    assert encode("mid-sized") == ["Ġmid", "Ġ-", "Ġsized"]
    assert len(encode("crimson")) > 1


def test_the_template_is_that_of_qwen3(folder):
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "a red circle"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na red circle<|im_end|>\n<|im_start|>assistant\n"
    ids = prompts.ChatTokenizer(folder, vocab_size=576).encode(
        "a red circle", max_sequence_length=64
    )
    assert list(ids.ids) == loaded(text)["input_ids"]
    assert len(ids.ids) == 8


# Chunks and the pool


def maker(folder, **changes):
    values = dict(tokenizer=folder, vocab_size=576, turns=SIZES, count=4, seed=0)
    values |= dict(caption_tokens=64, train_caption_tokens=64)
    return chunks.Maker(**{**values, **changes})


def test_chunks_take_turns_and_go_on_in_the_split(folder):
    one, two, three = (maker(folder).chunk(number) for number in range(3))
    assert (one.size, two.size, three.size) == (SIZES[0], SIZES[1], SIZES[0])
    assert two.pictures.shape == (4, 64, 96, 3)
    captions = [generator.generate(i, split="train", size=SIZES[0]).caption for i in range(4, 8)]
    encode = prompts.ChatTokenizer(folder, vocab_size=576).encode
    for ids, length, caption in zip(three.ids, three.lens, captions, strict=True):
        assert tuple(ids[:length]) == encode(caption, max_sequence_length=64).ids
        assert not ids[length:].any()


def test_a_size_with_two_turns_shows_no_scene_twice(folder):
    once, twice = maker(folder), maker(folder, turns=(SIZES[0], SIZES[1], SIZES[0]))
    again = [twice.chunk(number) for number in range(6)]
    for size in SIZES:
        made = [one.pictures for one in again if one.size == size]
        plain = [once.chunk(2 * i + SIZES.index(size)).pictures for i in range(len(made))]
        np.testing.assert_array_equal(made, plain)
    assert [one.size for one in again] == 2 * [SIZES[0], SIZES[1], SIZES[0]]


def test_scenes_with_long_captions_are_replaced(folder):
    whole = maker(folder, count=48).chunk(0)
    short = maker(folder, count=48, train_caption_tokens=16).chunk(0)
    assert short.ids.shape == (48, 16)
    fits = whole.lens <= 16
    assert 0 < fits.sum() < 48
    assert np.array_equal(short.lens[fits], whole.lens[fits])
    assert np.array_equal(short.pictures[fits], whole.pictures[fits])
    assert short.lens.min() > 0 and short.lens.max() <= 16
    # No picture stands beside the caption of another: the tokens are those of its own scene.
    scenes = [generator.generate(i, split="train", size=SIZES[0]) for i in range(48)]
    for i in np.flatnonzero(fits):
        encoded = prompts.ChatTokenizer(folder, vocab_size=576).encode(
            scenes[i].caption, max_sequence_length=64
        )
        assert tuple(short.ids[i, : short.lens[i]]) == encoded.ids


def test_captions_that_never_fit_are_refused(folder):
    with pytest.raises(errors.ConfigError, match="train_caption_tokens=4"):
        maker(folder, train_caption_tokens=4).chunk(0)
    with pytest.raises(errors.ConfigError, match="caption_tokens=8"):
        maker(folder, caption_tokens=8).tokens(
            [generator.generate(0, split="train", size=SIZES[0])]
        )


def test_processes_make_the_same_chunks(folder):
    here = chunks.Chunks(maker(folder), first=1, num_workers=0)
    there = chunks.Chunks(maker(folder), first=1, num_workers=1)
    for _ in range(3):
        one, two = here.take(waits=True), there.take(waits=True)
        assert one.size == two.size and np.array_equal(one.pictures, two.pictures)
    there.close()


class Numbered:
    """Chunks of one size whose pictures, ids and lengths are the number of the chunk."""

    def __init__(self):
        self.number = -1

    def take(self, *, waits):
        del waits
        self.number += 1
        full = [np.full(shape, self.number) for shape in ((2, 8, 8, 3), (2, 3), (2,))]
        pictures, ids, lens = full[0].astype(np.uint8), full[1], full[2]
        return chunks.Chunk(size=(8, 8), pictures=pictures, facts=None, ids=ids, lens=lens)

    def close(self):
        pass


def test_new_scenes_replace_the_oldest_and_latents_the_pictures():
    source = pool.Drawn(Numbered(), devices.Devices(1))
    scenes = pool.ScenePool(source, ((8, 8),), capacity=6, chunk=2, steps_per_chunk=3)
    views = [next(scenes) for _ in range(5)]
    assert [view.count for view in views] == [4, 6, 6, 6, 6]
    assert next(scenes).arrays["lens"].tolist() == [3, 3, 4, 4, 2, 2]  # of steps 3 and 6
    scenes.encode(lambda chunk: {"latents": chunk["pictures"][:, :1, 0, 0] * jnp.float32(10)})
    arrays = next(scenes).arrays
    assert "pictures" not in arrays
    assert arrays["latents"][:, 0].tolist() == [30, 30, 40, 40, 20, 20]
    drawn = pool.draw(jax.random.key(0), arrays, 4, 100)
    assert (drawn["latents"][:, 0] == 10 * drawn["lens"]).all()
    assert set(drawn["lens"].tolist()) == {3, 4}


def test_chunks_without_pictures_have_the_facts_of_their_captions(folder):
    drawn, told = (maker(folder, draws=draws).chunk(2) for draws in (True, False))
    assert drawn.facts is None and told.pictures is None and told.size == drawn.size
    assert np.array_equal(told.ids, drawn.ids) and np.array_equal(told.lens, drawn.lens)
    for facts, picture in zip(told.facts, drawn.pictures, strict=True):
        assert oracle.check(facts, picture).is_right


def test_views_take_turns_and_a_size_with_two_has_twice_the_views(folder):
    turns = (SIZES[0], SIZES[1], SIZES[0])
    source = pool.Drawn(
        chunks.Chunks(maker(folder, turns=turns), first=0, num_workers=0), devices.Devices(1)
    )
    scenes = pool.ScenePool(source, turns, capacity=16, chunk=4, steps_per_chunk=2)
    views = [next(scenes) for _ in range(6)]
    assert [view.size for view in views] == 2 * list(turns)
    assert all(view.arrays["pictures"].shape == (8, *view.size, 3) for view in views)


# The shipped model


def test_the_shipped_model_has_at_most_ten_megabytes(tmp_path):
    shipped = config()
    assert shipped.model_path == "configs/nano-image"
    built = networks.build(tiny_scenes.ROOT / shipped.model_path, tmp_path, "bfloat16")
    size = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in built.shapes.values())
    others = sum(path.stat().st_size for path in pathlib.Path(tmp_path).rglob("*.json"))
    assert size + others <= 10e6
    sides = {side for size in shipped.shapes for side in size}
    assert all(side % built.pipeline.size_multiple == 0 for side in sides)
    assert max(sides) <= built.pipeline.max_side
    assert shipped.caption_tokens <= built.pipeline.max_caption_tokens


@pytest.mark.campaign
def test_a_block_starts_with_little_and_the_velocity_with_nothing(tmp_path):
    built = tiny_scenes.build(tmp_path)
    params = networks.init_params(built, 0)
    latents = jax.random.normal(jax.random.key(0), (2, 4, 8, 8))
    ids, lens = jnp.zeros((2, 32), jnp.int32), jnp.array([3, 7])
    velocity = objectives.velocities(built, params, latents, jnp.array([1.0, 0.2]), ids, lens)
    assert not velocity.any()
    transformer = built.module("transformer", params)
    for _, gate_a, _, gate_m in transformer.modulations(jnp.ones((2, 24))):
        np.testing.assert_allclose(jnp.stack([gate_a, gate_m]), np.tanh(0.1), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("sizes=[64]", "sizes"),
        ("caption_tokens=40", "caption_tokens"),
        ("train_caption_tokens=40", "train_caption_tokens"),
        ("vae_steps=300000", "vae_steps"),
        ("teacher=jdllm-nano-image", "vae_steps=100000 must be 0 with a teacher"),
        ("teacher_tries=2", "teacher_tries=2 needs a teacher"),
        ("pool_scenes=300", "pool_scenes"),
        ("eval_steps=[0]", "eval_steps"),
        ("decay_share=0", "decay_share"),
        ("batch_size=0", "batch_size=0"),
        ("dp_size=0", "dp_size=0 must be at least 1"),
        ("dp_size=3", "batch_size=256 must be a multiple of dp_size=3"),
        ("sequence_length=32", "unknown key 'sequence_length'"),
    ],
)
def test_a_wrong_option_is_named(change, named):
    with pytest.raises(errors.ConfigError, match=named):
        config(change)


def test_more_devices_than_there_are_are_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"dp_size=64 needs as many devices.* \(cpu\)"):
        recipes.build(config("dp_size=64"), tmp_path)


# Learning


@pytest.mark.campaign
def test_a_flow_that_knows_its_scenes_samples_them_back(tmp_path):
    """Signs, noise levels and time: eight steps from noise lead to the latent of the caption."""
    built = tiny_scenes.build(tmp_path)
    learning = config("learning_rate=4e-3", "ema_decay=0.9")
    params = networks.init_params(built, 0)
    state = update.init(learning, params, average=params, step=0)
    known = jax.random.normal(jax.random.key(1), (2, 4, 1, 1)) * jnp.ones((2, 4, 8, 8))
    ids, lens = jnp.array([[5, 6, 7, 8], [9, 10, 11, 12]]), jnp.array([4, 3])
    ids = jnp.pad(ids, ((0, 0), (0, 28)))

    @jax.jit
    def step(state):
        key = jax.random.fold_in(jax.random.key(0), state.step)
        rows = [jnp.tile(array, (8, *[1] * (array.ndim - 1))) for array in (known, ids, lens)]
        order = jax.random.permutation(jax.random.fold_in(key, 1), 16)

        def loss(params):
            latents, *captions = (row[order] for row in rows)
            noise = jax.random.normal(jax.random.fold_in(key, 2), latents.shape)
            return objectives.flow_loss(built, params, latents, noise, *captions, key)

        return update.apply(learning, state, "flow", loss, jnp.float32(4e-3))

    for _ in range(250):
        state, metrics = step(state)
    assert float(metrics["loss"]) < 0.3
    x = jax.random.normal(jax.random.key(2), known.shape)
    sigmas = built.schedule.sigmas(8, image_tokens=16)

    @jax.jit
    def velocity(x, sigma):
        levels = jnp.full(2, sigma)
        return objectives.velocities(built, state.average, x, levels, ids, lens)

    for sigma, next_sigma in zip(sigmas, sigmas[1:]):
        x = x + (next_sigma - sigma) * velocity(x, sigma)
    assert float(jnp.abs(x - known).mean()) < 0.25


@pytest.mark.campaign
def test_latents_are_normalised_and_back(tmp_path):
    built = tiny_scenes.build(tmp_path)
    params = networks.init_params(built, 0)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    numbers = {networks.SHIFT: jnp.float32(0.3), networks.FACTOR: jnp.float32(1.7)}
    plain = objectives.clean_latents(built, params, pictures)
    normal = objectives.clean_latents(built, params | numbers, pictures)
    np.testing.assert_allclose(normal, (plain - 0.3) * 1.7, rtol=1e-5, atol=1e-5)
    want = built.module(networks.VAE, params).decode_denormalised(plain)
    got = objectives.decoded(built, params | numbers, normal)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
