"""Pairs of reflow, with a sampler and judges that can be computed: only right ones, none lost."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import errors
from jdllm.tasks.scenes import oracle
from jdllm.train.scenes import chunks, devices, judges, pool, reflow

SIZES = ((8, 8), (8, 16))
CHUNK, SHAPE = 4, (2, 3, 3)


class Captions:
    """Chunks of both sizes in turns; a caption's one id is its number, and so is its count."""

    def __init__(self):
        self.number = 0

    def take(self, *, waits):
        del waits
        first, self.number = self.number, self.number + CHUNK
        ids = np.arange(first, self.number, dtype=np.int32)[:, None]
        facts = tuple(
            oracle.Facts(things=(oracle.Thing(count=i, shape="star"),))
            for i in range(first, self.number)
        )
        size = SIZES[first // CHUNK % 2]
        lens = np.ones(CHUNK, np.int32)
        return chunks.Chunk(size=size, pictures=None, facts=facts, ids=ids, lens=lens)

    def close(self):
        pass


@dataclasses.dataclass
class World:
    """Samples are twice the start; `is_right(caption, try)` says what judges find."""

    is_right: object
    has_pictures: bool = True
    starts: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    tried: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def sample(self, size, noise, ids, lens):
        assert noise.shape == (CHUNK, *SHAPE) and noise.dtype == jnp.bfloat16
        for caption, start in zip(ids[:, 0].tolist(), noise, strict=True):
            assert SIZES[caption // CHUNK % 2] == size
            self.starts[caption].append(start.astype(np.float32))
        latents = jnp.asarray(2 * noise.astype(np.float32), jnp.bfloat16)
        pictures = np.broadcast_to(ids[:, :, None, None], (CHUNK, 1, 1, 3))
        return latents, jnp.asarray(pictures) if self.has_pictures else None

    def wrong(self, facts, pictures):
        found = []
        for one, picture in zip(facts, pictures, strict=True):
            caption = int(picture[0, 0, 0])
            assert one.things[0].count == caption  # a picture is judged by its own facts
            self.tried[caption] += 1
            found.append(() if self.is_right(caption, self.tried[caption]) else ("count: 7",))
        return found


def pairs_of(world, tries, *, step=0, captions=None):
    return reflow.Pairs(
        captions or Captions(), world.sample, world, lambda *_: SHAPE, devices.Devices(1),
        chunk=CHUNK, tries=tries, seed=0, step=step,
    )  # fmt: skip


def learnt(pairs, count):
    """Returns (noise, latents) by caption of some chunks."""
    rows = {}
    for _ in range(count):
        size, arrays = pairs.take(waits=True)
        assert {len(array) for array in arrays.values()} == {CHUNK}
        for i, caption in enumerate(arrays[pool.IDS][:, 0].tolist()):
            assert SIZES[caption // CHUNK % 2] == size and caption not in rows
            rows[caption] = tuple(
                np.asarray(arrays[name][i], np.float32) for name in (pool.NOISE, pool.LATENTS)
            )
    return rows


def test_only_right_samples_are_kept_with_the_first_noise():
    # Every third caption needs a second try, every fifth a third one, every seventh is never right.
    def is_right(caption, attempt):
        if caption % 7 == 0:
            return False
        return attempt > (caption % 3 == 0) + (caption % 5 == 0)

    world = World(is_right)
    rows = learnt(pairs_of(world, 3), 60)
    assert not any(caption % 7 == 0 for caption in rows)
    for caption, (noise, latents) in rows.items():
        starts = world.starts[caption]
        assert world.tried[caption] == len(starts) == 1 + (caption % 3 == 0) + (caption % 5 == 0)
        np.testing.assert_array_equal(noise, starts[0])
        np.testing.assert_array_equal(latents, 2 * starts[-1])  # of the try that was right
    assert max(world.tried.values()) == 3
    # None is lost: of the captions begun early, all that can be right are there.
    early = set(range(1, 100))
    assert {caption for caption in early if caption % 7} <= rows.keys()


def test_tries_begin_ever_farther_from_the_noise():
    world = World(lambda caption, attempt: attempt > caption % 3)
    learnt(pairs_of(world, 3), 100)
    for attempt, want in ((1, np.sqrt(1 - 1 / 9)), (2, np.sqrt(1 - 4 / 9))):
        starts = [s for s in world.starts.values() if len(s) > attempt]
        first, other = (np.concatenate([s[i].ravel() for s in starts]) for i in (0, attempt))
        assert len(first) > 1000
        assert np.corrcoef(first, other)[0, 1] == pytest.approx(want, abs=0.05)
        assert other.std() == pytest.approx(1, abs=0.05) and abs(other.mean()) < 0.1


def test_pairs_that_are_not_judged_come_at_once_and_with_all_captions():
    world = World(None, has_pictures=False)
    rows = learnt(pairs_of(world, 0), 5)
    assert rows.keys() == set(range(5 * CHUNK))
    for noise, latents in rows.values():
        np.testing.assert_array_equal(latents, 2 * noise)
    again, later = (
        learnt(pairs_of(World(None, has_pictures=False), 0, step=step), 1) for step in (0, 7)
    )
    np.testing.assert_array_equal(again[0], rows[0])
    assert not np.array_equal(later[0], rows[0])


class Late(Captions):
    is_ready = True

    def take(self, *, waits):
        return super().take(waits=waits) if waits or self.is_ready else None


def test_one_that_does_not_wait_judges_one_chunk_a_call():
    captions = Late()
    world = World(lambda caption, _: caption % 2 == 0)
    pairs = pairs_of(world, 1, captions=captions)
    found = []
    for i in range(8):
        found.append(pairs.take(waits=False))
        assert sum(world.tried.values()) == (i + 1) * CHUNK
    # Two of four are right and sizes take turns: of four calls the first two fill no chunk.
    assert [one is not None for one in found] == 2 * [False, False, True, True]
    captions.is_ready = False
    before = captions.number
    assert pairs.take(waits=False) is None  # the chunk that was begun is judged
    assert sum(world.tried.values()) == 9 * CHUNK
    assert pairs.take(waits=False) is None and captions.number == before
    assert pairs.take(waits=True) is not None


def test_a_pool_of_pairs_keeps_noise_latents_and_captions_together():
    world = World(lambda caption, attempt: attempt > caption % 2)
    scenes = pool.ScenePool(
        pairs_of(world, 2), SIZES, capacity=4 * CHUNK, chunk=CHUNK, steps_per_chunk=1
    )
    for _ in range(12):  # both rings begin anew meanwhile
        view = next(scenes)
        assert view.arrays.keys() == {"latents", "noise", "ids", "lens"}
    drawn = pool.draw(jax.random.key(0), view.arrays, view.count, 100)
    captions = np.asarray(drawn["ids"][:, 0]).tolist()
    assert len(set(captions)) > CHUNK
    for i, caption in enumerate(captions):
        starts = world.starts[caption]
        np.testing.assert_array_equal(np.asarray(drawn["noise"][i], np.float32), starts[0])
        np.testing.assert_array_equal(np.asarray(drawn["latents"][i], np.float32), 2 * starts[-1])


def test_a_size_that_is_seldom_right_does_not_make_every_step_bring_a_chunk():
    world = World(lambda caption, _: caption // CHUNK % 2 == 0 or caption % 16 == 4)
    pairs = pairs_of(world, 1)
    scenes = pool.ScenePool(pairs, SIZES, capacity=8 * CHUNK, chunk=CHUNK, steps_per_chunk=1000)
    for _ in range(20):
        next(scenes)
    judged = sum(world.tried.values())
    for _ in range(100):
        next(scenes)
    assert sum(world.tried.values()) == judged


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("is_right", [lambda *_: False, lambda i, _: i // CHUNK % 2 == 0])
def test_a_teacher_that_is_never_right_at_a_size_ends_the_run(waits, is_right):
    pairs = pairs_of(World(is_right), 1)
    said = "the teacher cannot teach: of the last 800 samples of 8x(8|16) only 0 are right"
    with pytest.raises(errors.ConfigError, match=said):
        for _ in range(1000):
            pairs.take(waits=waits)


def test_the_shares_of_right_samples_are_told(caplog):
    pairs = pairs_of(World(lambda caption, attempt: attempt > caption % 4), 3)
    with caplog.at_level("INFO", logger="jdllm.train.scenes.reflow"):
        learnt(pairs, 100)
    first, second = caplog.messages[:2]
    assert first.startswith("40 samples of the teacher: 0.250 of the first tries are right, ")
    assert second.startswith("400 samples of the teacher: 0.250 ")
    done = float(second.rpartition(", ")[2].split()[0])
    assert done == pytest.approx(3 / 4, abs=0.05)  # every fourth caption would need a fourth try


@pytest.mark.parametrize("seed", [0, -1])
def test_any_seed_is_one(seed):
    world = World(None, has_pictures=False)
    pairs = reflow.Pairs(
        Captions(), world.sample, world, lambda *_: SHAPE, devices.Devices(1),
        chunk=CHUNK, tries=0, seed=seed, step=0,
    )  # fmt: skip
    assert pairs.take(waits=True) is not None


def test_judges_in_processes_find_what_the_callers_own_do():
    facts = oracle.Facts(things=(), ground="red")
    grounds = [np.full((64, 64, 3), colour, np.uint8) for colour in ((214, 32, 38), (36, 72, 204))]
    here, there = judges.Judges(0), judges.Judges(1)
    found = here.wrong([facts] * 2, grounds)
    assert found[0] == () and found[1][0].startswith("ground: blue")
    assert there.wrong([facts] * 2, grounds) == found
    there.close()
