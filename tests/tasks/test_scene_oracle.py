"""The scenes' oracle: right on what is drawn, wrong on pictures where one fact was changed.

Pictures come from the generator, which shares no code with the oracle, and from loops here.
"""

import dataclasses
import random

import numpy as np
import pytest

from jdllm.tasks.scenes import drawing, generator, geometry, layout, oracle
from jdllm.tasks.scenes import reading as scene_reading
from jdllm.tasks.scenes.oracle import Facts, Relation, Thing
from jdllm.tasks.scenes.reading import Reading, Seen

LEAST_SHARE = 0.995  # of right pictures called right, and of changed ones called wrong
NOISE = 6  # of 255: about what a small generative model leaves
FEW = 40  # scenes of each split
MANY = [  # 0.995 of 200 leaves room for one
    pytest.param(200, marks=pytest.mark.campaign),
    pytest.param(1000, marks=pytest.mark.long),
]
SIZES = [(64, 64), (96, 96), (128, 128)]
CHANGES = ["colour", "shape", "count", "relation", "ground"]


def soft(picture, rng):
    """The picture after a blur with (1 2 1) / 4 both ways, with noise."""
    padded = np.pad(picture.astype(float), ((1, 1), (1, 1), (0, 0)), mode="edge")
    tall = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    blurred = (tall[:, :-2] + 2 * tall[:, 1:-1] + tall[:, 2:]) / 4
    noisy = blurred + rng.normal(0, NOISE, blurred.shape)
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def share_right(count, size, is_soft):
    rng = np.random.default_rng(0)
    right = []
    for split in ("train", "test"):
        for i in range(count):
            scene = generator.generate(i, split=split, size=size)
            picture = drawing.render(scene)
            picture = soft(picture, rng) if is_soft else picture
            right.append(oracle.check(scene.facts(), picture).is_right)
    return np.mean(right)


@pytest.mark.parametrize("is_soft", [False, True], ids=["sharp", "soft"])
@pytest.mark.parametrize("size", [*SIZES, (64, 128), (120, 72)], ids=str)
def test_what_is_drawn_is_right(size, is_soft):
    assert share_right(FEW // (max(size) // 32), size, is_soft) == 1


@pytest.mark.parametrize("is_soft", [False, True], ids=["sharp", "soft"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", MANY)
def test_nearly_all_that_is_drawn_is_right(count, size, is_soft):
    assert share_right(count, size, is_soft) >= LEAST_SHARE


def changed(scene, kind, rng):
    """The scene drawn anew with one stated fact changed; None if it has no such fact.

    The size words of the facts are left out by the caller: a new layout has other sizes.
    """
    groups = [layout.Wanted(count=g.count, shape=g.shape, colour=g.colour) for g in scene.groups]
    relations = list(scene.relations)
    ground = scene.ground
    i = rng.randrange(len(groups))
    hosts = {j for _, name, j in relations if name == "inside"}
    match kind:
        case "ground":
            if not scene.states_ground:
                return None
            used = {ground, *(group.colour for group in groups)}
            ground = rng.choice([name for name in generator.GROUNDS if name not in used])
        case "colour":
            if not scene.groups[i].states_colour:
                return None
            used = {ground, *(group.colour for group in groups)}
            colour = rng.choice([name for name in generator.COLOURS if name not in used])
            groups[i] = dataclasses.replace(groups[i], colour=colour)
        case "shape":
            allowed = layout.ROOM if i in hosts else generator.SHAPES
            shape = rng.choice([name for name in allowed if name != groups[i].shape])
            groups[i] = dataclasses.replace(groups[i], shape=shape)
        case "count":
            nested = hosts | {i for i, name, _ in relations if name == "inside"}
            more = groups[i].count + (1 if groups[i].count == 1 else rng.choice((-1, 1)))
            if i in nested or more > 3:
                return None
            groups[i] = dataclasses.replace(groups[i], count=more)
        case "relation":
            if not relations:
                return None
            k = rng.randrange(len(relations))
            one, name, other = relations[k]
            names = [n for n in ("left of", "right of", "above", "below") if n != name]
            relations[k] = (one, rng.choice(names), other)
    for _ in range(200):
        shapes = layout.place(rng, groups, relations, scene.size)
        if shapes is not None:
            return dataclasses.replace(scene, ground=ground, shapes=shapes)
    return None


def share_wrong(kind, count, size, is_soft):
    """The share of changed pictures that are wrong for the right reason alone."""
    rng, noise = random.Random(kind), np.random.default_rng(0)
    reason = {"colour": "things", "shape": "things", "relation": "relations"}.get(kind, kind)
    wrong = []
    index = 0
    while len(wrong) < count:
        split = ("train", "test")[index % 2]
        scene = generator.generate(index, split=split, size=size)
        index += 1
        other = changed(scene, kind, rng)
        if other is None:
            continue
        facts = scene.facts()
        unsized = tuple(dataclasses.replace(thing, size=None) for thing in facts.things)
        facts = dataclasses.replace(facts, things=unsized)
        picture = drawing.render(other)
        picture = soft(picture, noise) if is_soft else picture
        found = oracle.check(facts, picture).wrong
        wrong.append([text.split(":")[0] for text in found] == [reason])
    return np.mean(wrong)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_picture_with_one_fact_changed_is_wrong(kind):
    assert share_wrong(kind, FEW, (64, 64), is_soft=True) == 1


@pytest.mark.parametrize("is_soft", [False, True], ids=["sharp", "soft"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("count", MANY)
def test_nearly_all_pictures_with_one_fact_changed_are_wrong(count, kind, size, is_soft):
    assert share_wrong(kind, count, size, is_soft) >= LEAST_SHARE


def test_a_wrong_size_word_is_wrong():
    for i in range(FEW):
        scene = generator.generate(i, split="train")
        facts = scene.facts()
        picture = drawing.render(scene)
        others = [size for size in layout.SIZES if size != scene.groups[0].size]
        for size in others:
            first = dataclasses.replace(facts.things[0], size=size)
            told = dataclasses.replace(facts, things=(first, *facts.things[1:]))
            assert not oracle.check(told, picture).is_right, (scene, size)


# Pictures drawn here, pixel by pixel


def blank(colour, height=64, width=64):
    return np.full((height, width, 3), colour, np.uint8)


def disc(picture, y, x, radius, colour, hole=0):
    for row in range(picture.shape[0]):
        for column in range(picture.shape[1]):
            if hole**2 <= (row + 0.5 - y) ** 2 + (column + 0.5 - x) ** 2 <= radius**2:
                picture[row, column] = colour
    return picture


RED, BLUE, GREEN, WHITE = (230, 20, 20), (40, 60, 220), (20, 160, 60), (255, 255, 255)


def test_a_disc_and_a_square_by_hand():
    picture = disc(blank(WHITE), 20, 16, 8, RED)
    picture[14:28, 38:52] = BLUE
    circle, square = Thing(shape="circle", colour="red"), Thing(shape="square", colour="blue")
    right = Facts(things=(circle, square), relations=(Relation(0, "left of", 1),), ground="white")
    assert oracle.check(right, picture).wrong == ()
    order = Facts(things=(square, circle), relations=(Relation(0, "right of", 1),))
    assert oracle.check(order, picture).is_right
    for name in ("right of", "above", "below", "inside"):
        told = dataclasses.replace(right, relations=(Relation(0, name, 1),))
        assert oracle.check(told, picture).wrong[0].startswith("relations")
    swapped = Facts(
        things=(Thing(shape="circle", colour="blue"), Thing(shape="square", colour="red"))
    )
    assert oracle.check(swapped, picture).wrong == ("things: small red circle, small blue square",)


def test_what_lies_in_a_ring_or_on_a_square_is_inside_and_nothing_else():
    ring = disc(disc(blank(WHITE), 32, 30, 20, BLUE, hole=13), 32, 30, 6, RED)
    square = blank(WHITE)
    square[10:50, 8:48] = BLUE
    disc(square, 30, 26, 6, RED)
    for picture, shape in ((ring, "ring"), (square, "square")):
        things = (Thing(shape="circle", colour="red"), Thing(shape=shape, colour="blue"))
        for name in oracle.RELATIONS:
            told = Facts(things=things, relations=(Relation(0, name, 1),))
            assert oracle.check(told, picture).is_right == (name == "inside"), name
        turned = Facts(things=things, relations=(Relation(1, "inside", 0),))
        assert not oracle.check(turned, picture).is_right


def test_relations_of_a_plural_hold_for_each_of_its_shapes():
    picture = disc(blank(WHITE), 12, 12, 7, RED)
    disc(picture, 44, 12, 7, RED)
    picture[22:36, 40:54] = BLUE
    things = (Thing(count=2, shape="circle"), Thing(shape="square"))
    told = Facts(things=things, relations=(Relation(0, "left of", 1),))
    assert oracle.check(told, picture).is_right
    disc(blank_out(picture), 50, 47, 7, RED)
    assert not oracle.check(told, picture).is_right


def blank_out(picture):
    picture[36:, :24] = WHITE
    return picture


def test_no_named_shape_and_no_named_colour_are_wrong():
    bar = blank(WHITE)
    bar[28:34, 8:56] = RED
    assert scene_reading.read(bar).shapes[0].shape is None
    brown = disc(blank(WHITE), 32, 32, 12, (110, 90, 20))
    assert scene_reading.read(brown).shapes[0].colour is None
    for shape in generator.SHAPES:
        assert not oracle.check(Facts(things=(Thing(shape=shape),)), bar).is_right
    for colour in generator.COLOURS:
        told = Facts(things=(Thing(shape="circle", colour=colour),))
        assert not oracle.check(told, brown).is_right


def test_pictures_of_nothing_show_nothing():
    facts = Facts(things=(Thing(shape="circle"),), ground="green")
    empty = oracle.check(facts, blank(GREEN))
    assert empty.wrong == ("count: 0 shapes, not 1",)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    found = oracle.check(facts, noise)
    assert not found.is_right and found.reading.ground is None
    half = blank(GREEN)
    half[:, 32:] = BLUE
    assert scene_reading.read(half).ground is None


@pytest.mark.parametrize(
    "picture",
    [np.zeros((64, 64), np.uint8), np.zeros((64, 64, 4), np.uint8), np.zeros((64, 64, 3))],
    ids=["gray", "alpha", "float"],
)
def test_what_is_no_picture_is_refused(picture):
    with pytest.raises(ValueError, match=r"uint8 \[height, width, 3\]"):
        oracle.check(Facts(things=()), picture)


def test_an_unknown_relation_is_refused():
    with pytest.raises(ValueError, match="'beside'"):
        Relation(0, "beside", 1)


@pytest.mark.parametrize("has_diagonals", [False, True], ids=["sides", "corners"])
def test_components_are_those_of_a_flood_fill(has_diagonals):
    rng = np.random.default_rng(1)
    steps = [(-1, 0), (1, 0), (0, -1), (0, 1)]
    steps += [(-1, -1), (-1, 1), (1, -1), (1, 1)] if has_diagonals else []
    for share in (0.0, 0.2, 0.5, 0.7, 1.0):
        mask = rng.random((17, 23)) < share
        labels, count = geometry.components(mask, has_diagonals=has_diagonals)
        assert ((labels > 0) == mask).all()
        left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
        found = 0
        while left:
            found += 1
            waiting, region = [next(iter(left))], set()
            while waiting:
                pixel = waiting.pop()
                if pixel in left:
                    left.remove(pixel)
                    region.add(pixel)
                    waiting += [(pixel[0] + dy, pixel[1] + dx) for dy, dx in steps]
            names = {int(labels[pixel]) for pixel in region}
            assert len(names) == 1 and (labels == names.pop()).sum() == len(region)
        assert found == count


def test_moments_of_a_square_are_those_by_hand():
    weights = np.zeros((30, 40))
    weights[5:15, 10:20] = 1
    found = geometry.moments(weights)
    assert (found.y, found.x, found.area) == (10, 15, 100)
    # The polar moment of a square of side a is a^4 / 6.
    assert found.compactness == pytest.approx(100**2 / (2 * np.pi * 10**4 / 6))
    assert found.orders[0] == pytest.approx(0, abs=1e-9)


def test_each_kind_of_fact_is_judged_by_itself():
    facts = Facts(
        things=(Thing(shape="circle", colour="red"), Thing(shape="square", colour="blue")),
        relations=(Relation(0, "left of", 1),),
        ground="white",
    )

    def kinds(*shapes, ground="white"):
        seen = [
            Seen(shape=shape, colour=colour, size="small", y=50, x=x) for shape, colour, x in shapes
        ]
        reading = Reading(height=100, width=100, ground=ground, shapes=tuple(seen))
        found = oracle.by_kind(facts, reading)
        assert set(found) == {"count", "shape", "colour", "relation", "ground"}  # no size is told
        return {name for name, is_right in found.items() if not is_right}

    right = [("circle", "red", 20), ("square", "blue", 80)]
    assert kinds(*right) == set()
    assert kinds(*right, ground="black") == {"ground"}
    assert kinds(("circle", "red", 80), ("square", "blue", 20)) == {"relation"}
    assert kinds(("circle", "blue", 20), ("square", "red", 80)) == {"relation"}  # words swapped
    assert kinds(("circle", "red", 20), ("square", "green", 80)) == {"colour", "relation"}
    assert kinds(("star", "red", 20), ("square", "blue", 80)) == {"shape", "relation"}
    assert kinds(*right, ("star", "pink", 50)) == {"count", "shape", "colour", "relation"}


def noises():
    """Pictures of no scene: noise of pixels, of squares, of soft spots, and with faint spots."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        yield rng.integers(0, 256, (64, 64, 3))
        yield np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((8, 8, 1)))
        yield np.clip(128 + rng.normal(0, 20, (64, 64, 3)), 0, 255)
        spots = np.kron(rng.normal(0, 1, (4, 4, 3)), np.ones((16, 16, 1)))
        for _ in range(6):
            moved = [np.roll(spots, by, axis) for by in (2, -2) for axis in (0, 1)]
            spots = (spots + sum(moved)) / 5
        yield np.clip(128 + 200 * spots, 0, 255)


@pytest.mark.campaign
def test_pictures_of_noise_are_read_too():
    for picture in noises():
        scene_reading.read(picture.astype(np.uint8))
