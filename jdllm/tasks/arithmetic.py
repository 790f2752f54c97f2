"""Arithmetic word problems with worked answers in GSM8K's style, generated from a seed.

A problem has one to three steps of + - * and exact /. All values are positive integers, and results
are at most 1000. It is a story of this module's templates, or a problem that was written as a
whole (`word_problems/`), with drawn numbers, names and things. The answer is one line per step
with a calculator annotation, and the result follows `####`. It has no words, so that what a model
learns is which operations a question means.

`generate(index, split=..., seed=...)` is a pure function. The splits differ in four ways:
  names     every name of the test split is in `words.TEST_NAMES`, and never occurs in training;
  numbers   an operand pair (op, a, b) with `splits.is_held_out_pair` never occurs in training, and
            every test problem has one. For * and / the mirrored fact stays in training;
  phrasings a (family, frame, verb) with `splits.is_held_out_phrasing` never occurs in training,
            and every test problem of the templates has one;
  problems  a written problem with `splits.is_held_out_problem` never occurs in training.
The test split is a mixture of kinds: a quarter of templates, a quarter of written problems that
training shows too ("written_known"), and a half of those that it never shows ("written_new").
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jdllm.tasks import amounts, splits, words
from jdllm.tasks.amounts import Impossible, Step
from jdllm.tasks.splits import Split
from jdllm.tasks.story import Story
from jdllm.tasks.word_problems import numbers, rendering, rewording, written

Kind = Literal["template", "written_known", "written_new"]
TEST_MIXTURE: dict[Kind, float] = {"template": 0.25, "written_known": 0.25, "written_new": 0.5}

SPOKEN_SHARE = 0.3  # of reworded questions, those of "I" or "you" instead of a name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem; `gold` is the number after `####`.

    `phrasings` are the kinds of its sentences, or the key of a written problem.
    """

    id: str
    kind: Kind
    question: str
    answer: str
    gold: str
    steps: tuple[Step, ...]
    phrasings: tuple[str, ...]
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variety:
    """What training questions look like; the test split ignores it.

    `written_share` is the share of written problems. The others are passed on to `rewording`.
    """

    written_share: float = 0.75
    changes: rewording.Changes = rewording.Changes()


def generate(index: int, *, split: Split, seed: int = 0, variety: Variety | None = None) -> Problem:
    """Returns problem `index` of a split; the same arguments give the same problem."""
    if split not in ("train", "test"):
        raise ValueError(f"{split=} must be 'train' or 'test'")
    variety = variety or Variety()
    rng = random.Random(f"{seed}/{split}/{index}")
    kind = _draw_kind(rng, split, variety)
    spoken_share = SPOKEN_SHARE * variety.changes.reworded if split == "train" else 0.0
    id = f"{split}-{seed}-{index}"
    while True:
        try:
            if kind == "template":
                problem = _told(id, rng, split)
            else:
                problem = _written(id, rng, split, kind, spoken_share=spoken_share)
        except Impossible:
            continue
        if any(splits.is_held_out_pair(*step[:3]) for step in problem.steps) == (split == "test"):
            break
    if split == "train":
        question = rewording.change(problem.question, rng, problem.names, variety.changes)
        problem = dataclasses.replace(problem, question=question)
    return problem


def problems(split: Split, *, seed: int = 0, start: int = 0) -> Iterator[Problem]:
    """Yields problems `start`, `start + 1`, ... of a split, without end."""
    index = start
    while True:
        yield generate(index, split=split, seed=seed)
        index += 1


def _draw_kind(rng: random.Random, split: Split, variety: Variety) -> Kind:
    if split == "train":
        return "written_known" if rng.random() < variety.written_share else "template"
    (kind,) = rng.choices(list(TEST_MIXTURE), weights=list(TEST_MIXTURE.values()))
    return kind


def _written(
    id: str, rng: random.Random, split: Split, kind: Kind, *, spoken_share: float
) -> Problem:
    """Returns a written problem with numbers, people and things."""
    source = rng.choice(written.of_split("test" if kind == "written_new" else "train"))
    values, steps = numbers.draw(source, rng)
    wording = rng.choice(source.wordings)
    for slot in sorted(wording.slots - values.keys()):
        if slot in "abcdef":
            values[slot] = numbers.distractor(rng, source.ranges.get(slot))
    question, names = rendering.render(wording, values, rng, split, spoken_share=spoken_share)
    return Problem(
        id=id,
        kind=kind,
        question=question,
        answer=_answer(steps),
        gold=str(steps[-1][3]),
        steps=steps,
        phrasings=(source.key,),
        names=names,
    )


def _told(id: str, rng: random.Random, split: Split) -> Problem:
    """Returns a story of the templates."""
    story = Story(rng, split)
    question = rng.choice(SCENARIOS[rng.choice((1, 1, 2, 2, 3))])(story)
    if split == "test" and not any(map(splits.is_held_out_phrasing, story.phrasings)):
        raise Impossible
    return Problem(
        id=id,
        kind="template",
        question=" ".join([*story.sentences, question]),
        answer=_answer(story.steps),
        gold=str(story.steps[-1][3]),
        steps=tuple(story.steps),
        phrasings=tuple(story.phrasings),
        names=tuple(story.names),
    )


def _answer(steps: Sequence[Step]) -> str:
    return "\n".join([*map(amounts.line, steps), f"#### {steps[-1][3]}"])


# Parts of a story. Each adds its sentences and returns the current value.


def _start(story: Story) -> int:
    value = story.amount()
    story.say("start", n=value, c=story.rng.choice(words.PLACES))
    return value


def _groups(story: Story) -> int:
    n, k = story.factors()
    story.say("groups", n=n, k=k)
    return story.step("*", n, k)


def _rate(story: Story) -> int:
    k, n = story.factors()
    story.say("rate", k=k, n=n)
    return story.step("*", k, n)


def _change(story: Story, value: int) -> int:
    """Adds a gain or a loss."""
    rng = story.rng
    if rng.random() < 0.5:
        n = story.amount()
        if rng.random() < 0.7:
            story.say("gain", n=n)
        else:
            giver = story.partner(words.GIVERS)
            is_name = giver in story.names
            story.say("given", n=n, G=giver, g=giver if is_name else giver[0].lower() + giver[1:])
        return story.step("+", value, n)
    n = story.below(value)
    if rng.random() < 0.6:
        story.say("lose", n=n)
    else:
        story.say("give", n=n, t=story.partner(words.TAKERS))
    return story.step("-", value, n)


def _money_change(story: Story, value: int) -> int:
    if story.rng.random() < 0.5:
        n = story.amount()
        story.say("earn", n=n)
        return story.step("+", value, n)
    n = story.below(value)
    story.say("spend", n=n, o=story.new_things())
    return story.step("-", value, n)


def _compare(story: Story, value: int) -> int:
    """Adds a second person, who has more, fewer or k times as many; returns their amount."""
    rng = story.rng
    draw = rng.random()
    if draw < 0.3:
        n = story.amount()
        story.say("more", n=n)
        return story.step("+", value, n)
    if draw < 0.6:
        n = story.below(value)
        story.say("fewer", n=n)
        return story.step("-", value, n)
    if draw < 0.7:
        story.say("times", n="half")
        return story.step("/", value, 2)
    k = rng.randint(2, 6)
    word = ("twice", "three times", "four times", "five times", "six times")[k - 2]
    story.say("times", n=word if k == 2 or rng.random() < 0.5 else f"{k} times")
    return story.step("*", value, k)


def _share(story: Story, value: int) -> str:
    """Ends with an exact division; returns the question."""
    n = story.divisor(value)
    if story.rng.random() < 0.6:
        story.say("share", n=n)
        story.step("/", value, n)
        return story.ask("each")
    plural, single = story.rng.choice(words.CONTAINERS)
    story.slots |= {"C": plural, "c": single}
    story.say("pack", n=n)
    story.step("/", value, n)
    return story.ask("bags")


# Scenarios: (number of steps) -> functions that tell a story and return its question.


def _ask_state(story: Story) -> str:
    op = story.steps[-1][0]
    return story.ask({"+": "now", "-": "left", "*": "total"}[op])


def _inventory(story: Story, num_steps: int) -> str:
    value = _start(story)
    for _ in range(num_steps):
        value = _change(story, value)
    return _ask_state(story)


def _grouped(story: Story, num_steps: int) -> str:
    value = story.rng.choice((_groups, _rate))(story)
    for _ in range(num_steps - 1):
        value = _change(story, value)
    return _ask_state(story)


def _shared(story: Story, num_steps: int) -> str:
    if num_steps == 1:
        divisor = amounts.any_divisor(story.rng)
        value = divisor * amounts.factor(story.rng, divisor)
        story.say("start", n=value, c=story.rng.choice(words.PLACES))
    elif story.rng.random() < 0.4:
        value = story.rng.choice((_groups, _rate))(story)
    else:
        value = _change(story, _start(story))
    while len(story.steps) < num_steps - 1:
        value = _change(story, value)
    return _share(story, value)


def _comparison(story: Story, num_steps: int) -> str:
    first = _start(story) if num_steps < 3 else _change(story, _start(story))
    second = _compare(story, first)
    if num_steps == 1:
        return story.ask("other")
    story.step("+", first, second)
    return story.ask("both")


def _two_people(story: Story, num_steps: int) -> str:
    """Asks for the sum or the difference of two amounts, after changes of the first one."""
    first, second = story.amount(), story.amount()
    story.say("two", n=first, k=second)
    for _ in range(num_steps - 1):
        first = _change(story, first)
    if story.rng.random() < 0.6:
        story.step("+", first, second)
        return story.ask("both")
    story.step("-", first, second)
    return story.ask("differ")


def _shopping(story: Story, num_steps: int) -> str:
    """Buys things at a price; two steps ask for the change, three add a second kind of thing."""
    n, k = story.factors()
    story.say("price", n=n, k=k)
    cost = story.step("*", n, k)
    if num_steps == 1:
        return story.ask("pay")
    if num_steps == 2:
        cash = cost + story.rng.randint(1, 60)
        story.say("cash", n=cash)
        story.step("-", cash, cost)
        return story.ask("change")
    n, k = story.factors()
    things = story.slots["o"]
    while story.slots["o"] == things:
        story.slots["o"] = story.new_things()
    story.say("price_more", n=n, k=k)
    other = story.step("*", n, k)
    story.step("+", cost, other)
    return story.ask("pay")


def _wages(story: Story, num_steps: int) -> str:
    k, n = story.factors()
    story.say("wage", k=k, n=n)
    value = story.step("*", k, n)
    if num_steps == 1:
        return story.ask("earned")
    for _ in range(num_steps - 1):
        value = _money_change(story, value)
    return story.ask("wallet")


def _wallet(story: Story, num_steps: int) -> str:
    value = story.amount()
    story.say("money", n=value)
    for _ in range(num_steps):
        value = _money_change(story, value)
    return story.ask("wallet")


Scenario = Callable[[Story], str]


def _of_length(num_steps: int) -> tuple[Scenario, ...]:
    kinds = (
        _inventory, _inventory, _inventory, _grouped, _grouped, _shared, _shared, _comparison,
        _comparison, _two_people, _shopping, _wages, _wallet,
    )  # fmt: skip
    return tuple(functools.partial(kind, num_steps=num_steps) for kind in kinds)


SCENARIOS: dict[int, tuple[Scenario, ...]] = {n: _of_length(n) for n in (1, 2, 3)}
