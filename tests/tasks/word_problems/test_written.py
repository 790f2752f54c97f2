"""The parser of written problems: what it reads, and how it names faults."""

import random

import pytest

from jdllm.tasks import amounts, splits
from jdllm.tasks.word_problems import numbers, written

PICKLES = """# a comment
@ a*b ; r1-c | a 2-9, b 4-12
{A} fills {a} jars with {b} pickles each. {A.He} eats {c}. How many are left?
There are {b} pickles in {A}'s {a} jars, [but|and] {c} get [eaten|lost]. How many [stay|are left]?

@ 12/a
A dozen {o} for {a} people: how many for each?
"""
WORDING = "{A} has {a} {o} and {b} {p}. How many?"


def test_a_file_is_read_problem_by_problem():
    one, other = written.parse(PICKLES, "p.txt")
    assert one.place == "p.txt:2" and other.place == "p.txt:6"
    assert one.steps == (("*", "a", "b"), ("-", "r1", "c"))
    assert one.ranges == {"a": (2, 9), "b": (4, 12)} and one.variables == {"a", "b", "c"}
    assert one.wordings[0].slots == {"A", "A.He", "a", "b", "c"}
    assert other.steps == (("/", 12, "a"),)
    choices = [part for part in one.wordings[1].parts if not isinstance(part, str)]
    assert choices == [(("but",), ("and",)), (("eaten",), ("lost",)), (("stay",), ("are left",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WORDING, "p.txt:1: a problem begins with '@ '"),
        ("@ a+b", "p.txt:1: 0 wordings"),
        ("@ a+b\n" + 5 * f"{WORDING}\n", "p.txt:1: 5 wordings"),
        (f"@ a%b\n{WORDING}", "p.txt:1: 'a%b' is no step"),
        (f"@ r1+b ; a+b\n{WORDING}", "p.txt:1: r1 stands before that step"),
        (f"@ a+b ; r1+a ; r2+a ; r2+b\n{WORDING}", "p.txt:1: 4 steps, at most 3"),
        (f"@ a+b | a 9-2\n{WORDING}", "p.txt:1: 'a 9-2' is no range"),
        (f"@ a+b | c 2-9\n{WORDING}", "p.txt:1: no wording shows c of the ranges"),
        (f"@ a+c\n{WORDING}", "p.txt:2: the wording does not show c"),
        ("@ a+b\n{A} has {a} [and {b}|]. How many?", "p.txt:2: the wording does not show b"),
        ("@ a+b\n{a} and {b} for {C}?", "p.txt:2: {C} is no number, person or thing"),
        ("@ a+b\n{a} and {b} [here]?", r"p.txt:2: \[here\] has no alternative"),
        ("@ a+b\n{a} and {b} [here|there?", "p.txt:2: a bracket of .* has no partner"),
        ("@ a+b\n{a} and {b}.", "p.txt:2: the wording asks nothing"),
    ],
)
def test_a_fault_names_file_and_line(text, message):
    with pytest.raises(written.WrittenError, match=message):
        list(written.parse(text, "p.txt"))


def test_every_problem_of_the_package_is_read_once_and_is_in_one_split():
    everything = written.everything()
    keys = [problem.key for problem in everything]
    assert len(keys) == len(set(keys)) > 500
    train, test = written.of_split("train"), written.of_split("test")
    assert not {p.key for p in train} & {p.key for p in test}
    assert len(train) + len(test) == len(everything)
    assert 0.03 < len(test) / len(everything) < 0.07
    assert all(splits.is_held_out_problem(p.key) for p in test)


@pytest.mark.skipif(
    not written.NEXT_FOLDER.is_dir(), reason="no problems wait for the next training run"
)
def test_the_next_problems_are_new():
    known = {problem.key for problem in written.everything()}
    added = written.read(written.NEXT_FOLDER)
    assert added, "the folder holds problems"
    assert all(problem.key not in known for problem in added)


def test_numbers_fit_the_steps_and_the_ranges_of_every_problem():
    rng = random.Random(0)
    for problem in (*written.everything(), *written.read(written.NEXT_FOLDER)):
        for _ in range(3):
            values, steps = drawn(problem, rng)
            assert problem.variables <= values.keys(), problem.place
            known = dict(values)
            for number, ((op, x, y), (_, a, b, result)) in enumerate(
                zip(problem.steps, steps, strict=True), start=1
            ):
                assert (a, b) == (known.get(x, x), known.get(y, y)), problem.place
                exact = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op]
                assert 0 < exact == result <= 1000, problem.place
                known[f"r{number}"] = result
            for name, (low, high) in problem.ranges.items():
                if name in values:
                    assert low <= values[name] <= high, problem.place


def drawn(problem, rng):
    """Returns the numbers of a problem; a few problems are hard to fit, none is impossible."""
    for _ in range(20):
        try:
            return numbers.draw(problem, rng)
        except amounts.Impossible:
            continue
    raise AssertionError(f"{problem.place}: no numbers fit")
