"""Laws of the problem generator: right answers, determinism, disjoint splits."""

import re

import pytest
from support import shown_numbers

from jdllm.tasks import arithmetic, gsm8k, splits, words
from jdllm.tasks.arithmetic import TEST_MIXTURE
from jdllm.tasks.word_problems import written

ANNOTATION = re.compile(r"(\d+) ([-+*/]) (\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
TOM = "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?"


@pytest.fixture(scope="module")
def train():
    return [arithmetic.generate(i, split="train") for i in range(4000)]


@pytest.fixture(scope="module")
def test():
    return [arithmetic.generate(i, split="test") for i in range(400)]


def evaluate(op, a, b):
    """Independent of the generator: counts instead of trusting its result."""
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return sum(a for _ in range(b))
        case "/":
            return next(q for q in range(a + 1) if q * b == a)


def test_every_annotation_is_true_and_gold_is_the_last(train, test):
    for problem in train[:1000] + test:
        *lines, last = problem.answer.split("\n")
        found = [match.groups() for match in map(ANNOTATION.fullmatch, lines) if match]
        assert len(lines) == len(found) == len(problem.steps)
        for a, op, b, a2, op2, b2, result, shown in found:
            assert (a, op, b, result) == (a2, op2, b2, shown)
            assert 1000 >= evaluate(op, int(a), int(b)) == int(result) > 0
        assert last == f"#### {found[-1][-1]}"
        assert problem.gold == found[-1][-1]


def test_operands_come_from_the_question_or_an_earlier_result(train, test):
    """Or they are constants of a written problem: "twice", "a week", "100 cents"."""
    constants = {
        problem.key: {o for _, *pair in problem.steps for o in pair if isinstance(o, int)}
        for problem in written.everything()
    }
    for problem in train[:2000] + test:
        known = shown_numbers.of(problem.question)
        known |= {2 for word in ("half", "twice") if f" {word} " in problem.question}
        known |= constants.get(problem.phrasings[0], set())
        for _, a, b, result in problem.steps:
            assert {a, b} <= known, problem
            known.add(result)


def test_a_problem_says_of_which_kind_it_is(train, test):
    shares = {kind: sum(p.kind == kind for p in test) / len(test) for kind in TEST_MIXTURE}
    assert shares == pytest.approx(TEST_MIXTURE, abs=0.07)
    assert {p.kind for p in train} == {"template", "written_known"}
    assert sum(p.kind == "template" for p in train) / len(train) == pytest.approx(0.25, abs=0.03)
    keys = {split: {p.key for p in written.of_split(split)} for split in ("train", "test")}
    for problem in train + test:
        if problem.kind != "template":
            known = "test" if problem.kind == "written_new" else "train"
            assert set(problem.phrasings) <= keys[known]


@pytest.mark.parametrize(("share", "kind"), [(0.0, "template"), (1.0, "written_known")])
def test_the_share_of_written_problems_is_an_option(share, kind):
    variety = arithmetic.Variety(written_share=share)
    kinds = {arithmetic.generate(i, split="train", variety=variety).kind for i in range(50)}
    assert kinds == {kind}


def test_the_same_arguments_give_the_same_problem():
    for split in ("train", "test"):
        one = [arithmetic.generate(i, split=split, seed=3) for i in (0, 7, 11)]
        assert one == [arithmetic.generate(i, split=split, seed=3) for i in (0, 7, 11)]
    assert arithmetic.generate(0, split="train", seed=3) != arithmetic.generate(
        0, split="train", seed=4
    )


def test_names_are_disjoint(train, test):
    trained = {name for problem in train for name in problem.names}
    assert not trained & words.TEST_NAMES
    for problem in test:
        assert set(problem.names) <= words.TEST_NAMES
    assert not set(words.HE_NAMES + words.SHE_NAMES) & words.TEST_NAMES


def test_every_test_problem_has_numbers_and_a_phrasing_training_never_shows(train, test):
    pairs = {step[:3] for problem in train for step in problem.steps}
    phrasings = {phrasing for problem in train for phrasing in problem.phrasings}
    for problem in test:
        assert any(splits.is_held_out_pair(*step[:3]) for step in problem.steps)
        assert not all(step[:3] in pairs for step in problem.steps)
        if problem.kind != "written_known":
            assert not set(problem.phrasings) <= phrasings


def test_a_held_out_product_keeps_its_mirror_in_training():
    held = [
        (a, b) for a in range(2, 21) for b in range(2, 21) if splits.is_held_out_pair("*", a, b)
    ]
    assert held
    assert not any(splits.is_held_out_pair("*", b, a) for a, b in held)


def test_no_question_repeats_across_splits(train, test):
    assert not {p.question for p in train} & {p.question for p in test}


def test_the_mix_has_every_length_and_operation(train):
    told = [p for p in train if p.kind == "template"]
    counts = [sum(len(p.steps) == n for p in told) / len(told) for n in (1, 2, 3)]
    assert counts == pytest.approx([0.4, 0.4, 0.2], abs=0.06)
    ops = [step[0] for p in train for step in p.steps]
    for op in "+-*/":
        assert ops.count(op) / len(ops) > 0.05


def test_the_plainest_story_stays_in_training():
    assert "apples" in words.THINGS and "Tom" in words.HE_NAMES
    assert not splits.is_held_out_pair("+", 7, 5)
    for key in (
        "start|{A} {v} {n} {o}.|has",
        "gain|{P} {v} {n} more {o}.|buys",
        "now|How many {o} does {p} have|now?",
    ):
        assert not splits.is_held_out_phrasing(key), (key, TOM)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split='dev'"):
        arithmetic.generate(0, split="dev")


def test_the_arithmetic_task_is_the_test_split():
    examples = gsm8k.load_arithmetic(None, 3)
    assert [e.question for e in examples] == [
        arithmetic.generate(i, split="test").question for i in range(3)
    ]
