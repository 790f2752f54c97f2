"""Laws of the scene generator: captions hold, shapes keep apart, splits are disjoint."""

import dataclasses
import re

import numpy as np
import pytest

from jdllm.tasks.scenes import drawing, generator, splits, words

SIZES = ((64, 64), (96, 96), (64, 112), (128, 64))


@pytest.fixture(scope="module")
def train():
    return [generator.generate(i, split="train") for i in range(1200)]


@pytest.fixture(scope="module")
def test():
    return [generator.generate(i, split="test") for i in range(300)]


def test_the_same_arguments_give_the_same_scene_and_picture():
    for split in ("train", "test"):
        one = [generator.generate(i, split=split, seed=3) for i in (0, 7, 11)]
        two = [generator.generate(i, split=split, seed=3) for i in (0, 7, 11)]
        assert one == two
        for a, b in zip(one, two):
            np.testing.assert_array_equal(drawing.render(a), drawing.render(b))
    others = [
        generator.generate(0, split="train", seed=4),
        generator.generate(1, split="train", seed=3),
        generator.generate(0, split="train", seed=3, size=(96, 96)),
    ]
    assert generator.generate(0, split="train", seed=3) not in others


def test_scenes_go_on_from_any_start():
    found = generator.scenes("test", seed=2, start=5)
    assert [next(found) for _ in range(2)] == [
        generator.generate(i, split="test", seed=2) for i in (5, 6)
    ]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_shape_touches_another_one_or_the_border(split, size):
    for i in range(60):
        scene = generator.generate(i, split=split, size=size)
        nested = {(i, j) for i, name, j in scene.relations if name == "inside"}
        # The ground goes to black and the shape to white, so each mask is a picture of its own.
        masks = []
        for shape in scene.shapes:
            alone = dataclasses.replace(
                scene, ground="black", shapes=(dataclasses.replace(shape, colour="white"),)
            )
            masks.append(drawing.render(alone)[:, :, 0] > drawing.COLOURS["black"][0])
        for k, mask in enumerate(masks):
            assert mask.any()
            border = (mask[0], mask[-1], mask[:, 0], mask[:, -1])
            assert not any(edge.any() for edge in border), scene
            for n in range(k):
                one, two = scene.shapes[k].group, scene.shapes[n].group
                if {(one, two), (two, one)} & nested:
                    _assert_inside(scene, mask, masks[n])
                else:
                    assert not (spread(mask) & masks[n]).any(), scene


def spread(mask):
    """The mask with its neighbours."""
    padded = np.pad(mask, 1)
    shifts = [np.roll(padded, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    return np.any(shifts, axis=0)[1:-1, 1:-1]


def _assert_inside(scene, inner, outer):
    """The inner shape comes later; from each of its pixels, the outer one is in all directions."""
    around = [np.maximum.accumulate(outer, axis) for axis in (0, 1)]
    around += [np.maximum.accumulate(outer[::-1], 0)[::-1]]
    around += [np.maximum.accumulate(outer[:, ::-1], 1)[:, ::-1]]
    assert not (inner & ~np.all(around, axis=0)).any(), scene
    outside = ~np.all(around, axis=0)
    assert not (spread(inner) & outside).any(), scene


def test_shapes_and_ground_differ_in_colour(train, test):
    for scene in train + test:
        assert 1 <= len(scene.shapes) <= 3
        assert scene.ground not in {shape.colour for shape in scene.shapes}
        for i, name, j in scene.relations:
            assert name != "inside" or scene.groups[i].colour != scene.groups[j].colour


def test_facts_are_those_of_the_drawn_shapes(train, test):
    for scene in train + test:
        facts = scene.facts()
        for i, thing in enumerate(facts.things):
            drawn = [shape for shape in scene.shapes if shape.group == i]
            assert len(drawn) == thing.count
            for shape in drawn:
                assert shape.shape == thing.shape
                assert thing.colour in (None, shape.colour)
                assert thing.size in (None, shape.size)
        assert facts.ground in (None, scene.ground)


NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "2": 2, "three": 3, "3": 3}
THING = (
    r"(?P<count{n}>an?|one|two|2|three|3) (?:(?P<size{n}>[a-z-]+) )??(?P<colour{n}>{colours}) "
    r"(?P<shape{n}>circle|square|triangle|star|ring)s?"
)
COLOURS = "red|orange|yellow|green|cyan|blue|purple|pink"
RELATED = re.compile(
    f"(?:{THING.format(n=0, colours=COLOURS)}) (?P<rel>to the left of|to the right of|above|below"
    f"|inside) (?:{THING.format(n=1, colours=COLOURS)})"
)


def test_plain_relations_say_what_is_drawn(train, test):
    """Reads captions such as "a red circle above two small blue stars" without the generator."""
    count = 0
    for scene in train + test:
        told = RELATED.search(scene.caption.lower())
        if told is None:
            continue
        count += 1
        groups = []
        for n in "01":
            found = [
                shape
                for shape in scene.shapes
                if (shape.colour, shape.shape) == (told[f"colour{n}"], told[f"shape{n}"])
            ]
            assert len(found) == NUMBERS[told[f"count{n}"]], scene
            size = told[f"size{n}"]
            assert size is None or all(size in words.SIZES[shape.size] for shape in found)
            groups.append(found)
        for one in groups[0]:
            for two in groups[1]:
                match told["rel"]:
                    case "to the left of":
                        assert two.x - one.x > abs(two.y - one.y)
                    case "to the right of":
                        assert one.x - two.x > abs(two.y - one.y)
                    case "above":
                        assert two.y - one.y > abs(two.x - one.x)
                    case "below":
                        assert one.y - two.y > abs(two.x - one.x)
                    case "inside":
                        assert max(abs(one.x - two.x), abs(one.y - two.y)) < two.radius
    assert count >= 40


def test_captions_tell_the_ground_only_when_facts_do(train, test):
    for scene in train + test:
        named = re.search(r"background|backdrop|ground", scene.caption) is not None
        assert named == scene.states_ground, scene
        if named:
            around = re.search(
                r"(?:background|backdrop) is ([a-z]+)|an? ([a-z]+) (?:background|backdrop|ground)",
                scene.caption.lower(),
            )
            assert around is not None
            assert (around[1] or around[2]) in words.COLOURS[scene.ground], scene


def test_captions_name_every_group_by_what_facts_state(train, test):
    for scene in train + test:
        text = scene.caption.lower()
        assert "{" not in text and "  " not in text, scene
        for group in scene.groups:
            assert any(noun in text for noun in words.NOUNS[group.shape]), scene
            if group.states_colour:
                assert any(word in text for word in words.COLOURS[group.colour]), scene
            if group.states_size:
                assert any(word in text for word in words.SIZES[group.size]), scene
        if not any(group.states_size for group in scene.groups):
            every = {word for table in words.SIZES.values() for word in table}
            assert not every & set(re.findall(r"[a-z-]+", text)), scene


def test_articles_fit(train, test):
    for scene in train + test:
        for article, letter in re.findall(r"\b([Aa]n?) ([a-z])", scene.caption):
            assert (article.lower() == "an") == (letter in "aeiou"), scene


def test_every_test_scene_has_a_combination_and_a_phrasing_training_never_shows(train, test):
    combinations = {row for scene in train for row in scene.combinations}
    phrasings = {pair for scene in train for pair in scene.phrasings}
    for scene in test:
        assert any(splits.is_held_out_combination(*row) for row in scene.combinations)
        assert not set(scene.combinations) <= combinations
        assert any(splits.is_held_out_phrasing(*pair) for pair in scene.phrasings)
        assert not set(scene.phrasings) <= phrasings


def test_a_held_out_combination_is_told_with_its_colour(test):
    for scene in test:
        told = {(g.colour, g.shape) for g in scene.groups if g.states_colour}
        held_out = [row for row in scene.combinations if splits.is_held_out_combination(*row)]
        assert any(row[:2] in told for row in held_out)


def test_training_knows_every_word_of_the_test_split(train, test):
    def vocabulary(scenes):
        return {
            word for scene in scenes for word in re.findall(r"[a-z0-9-]+", scene.caption.lower())
        }

    assert vocabulary(test) <= vocabulary(train)
    assert not {scene.caption for scene in test} & {scene.caption for scene in train}


def test_held_out_combinations_touch_everything_but_leave_most_of_it():
    rows = [
        (colour, shape, role)
        for colour in generator.COLOURS
        for shape in generator.SHAPES
        for role in splits.ROLES
    ]
    held_out = [row for row in rows if splits.is_held_out_combination(*row)]
    assert 0.09 < len(held_out) / len(rows) < 0.16
    for k, values in enumerate((generator.COLOURS, generator.SHAPES, splits.ROLES)):
        for value in values:
            assert 2 <= sum(row[k] == value for row in held_out) <= 9, value


def test_the_plainest_captions_stay_in_training():
    assert not splits.is_held_out_combination("red", "circle", "unrelated")
    for shape in generator.SHAPES:
        assert not splits.is_held_out_phrasing("noun", "{x}", shape)
        assert not splits.is_held_out_phrasing("size", "small", shape)
    for colour in generator.COLOURS:
        assert not splits.is_held_out_phrasing("colour", "{x}", colour)
    for wordings in words.RELATIONS.values():
        assert not splits.is_held_out_phrasing("relation", "{x}", wordings[0])


def test_the_mix_has_every_kind(train):
    def share(found):
        return sum(map(bool, found)) / len(train)

    for count in (1, 2, 3):
        assert share(len(s.shapes) == count for s in train) > 0.15
    for name in ("left of", "right of", "above", "below", "inside"):
        assert share(name in [r[1] for r in s.relations] for s in train) > 0.08
    for size in words.SIZES:
        assert share(size in [shape.size for shape in s.shapes] for s in train) > 0.2
    for shape in generator.SHAPES:
        assert share(shape in [g.shape for g in s.groups] for s in train) > 0.2
    assert share(len(s.relations) == 2 for s in train) > 0.07
    assert share(max(g.count for g in s.groups) > 1 for s in train) > 0.1
    assert len({s.caption for s in train}) > 0.9 * len(train)


def test_edges_are_soft_and_colours_exact():
    scene = next(
        scene
        for scene in generator.scenes("train")
        if [(s.shape, s.size) for s in scene.shapes] == [("circle", "large")]
    )
    picture = drawing.render(scene).reshape(-1, 3)
    ground, colour = (np.array(drawing.COLOURS[c]) for c in (scene.ground, scene.shapes[0].colour))
    is_ground = (picture == ground).all(axis=1)
    is_shape = (picture == colour).all(axis=1)
    radius = scene.shapes[0].radius * 64
    # Pixels that a circle's edge crosses are about 8 radii; covered shares add up to its area.
    assert 6 * radius < (~is_ground & ~is_shape).sum() < 9 * radius
    contrast = (colour - ground).astype(float)
    covered = ((picture - ground.astype(float)) @ contrast / (contrast @ contrast)).sum()
    assert covered == pytest.approx(np.pi * radius**2, rel=0.01)


def test_a_scene_can_be_drawn_larger():
    scene = generator.generate(4, split="train")
    small, large = drawing.render(scene), drawing.render(scene, (128, 128))
    assert large.shape == (128, 128, 3)
    halved = large.reshape(64, 2, 64, 2, 3).astype(float).mean(axis=(1, 3))
    # Along an edge, two grids of 16 and of 64 samples may differ by an eighth of the contrast.
    assert np.abs(halved - small).max() < 255 / 8


@pytest.mark.parametrize("size", [(63, 64), (64, 32), (64, 130), (0, 0)], ids=str)
def test_an_impossible_size_is_refused(size):
    with pytest.raises(ValueError, match=re.escape(f"{size=}")):
        generator.generate(0, split="train", size=size)


def test_other_proportions_and_splits_are_refused():
    with pytest.raises(ValueError, match="proportions"):
        drawing.render(generator.generate(0, split="train"), (64, 96))
    with pytest.raises(ValueError, match="split='dev'"):
        generator.generate(0, split="dev")  # pyright: ignore[reportArgumentType]  # that is tested
