r"""Final answers of MATH: where they stand, and which are equal."""

import json

import pytest

from jdllm.tasks import math500, math_answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}. No, \boxed{\frac{1}{2}}!", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"$\boxed 7$ is it", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{a} then cut \boxed{b", None),
        ("The final answer is 12.", "12"),
        ("Final Answer: The final answer is $x^2$. I hope it is correct.", "$x^2$"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_final_answer(text, answer):
    assert math_answers.final_answer(text) == answer


EQUAL = [
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"-\frac{2}{3}", "-2/3"),
    (r"\frac{3}{4}", "0.75"),
    ("x = 5", "5"),
    ("10,000", "10000"),
    (r"10{,}000", "10000"),
    (r"10,\!000", "10000"),
    (r"12\text{ cm}", "12"),
    ("12 cm", "12"),
    (r"\$18", "18"),
    (r"90^\circ", "90"),
    (r"45\%", "45"),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(C)}", "(C)"),
    (".5", "0.5"),
    ("5.0", "5"),
    (r"p - q", "p-q"),
    (r"2\pi cm", r"2\pi"),
    (r"\left[2, 5\right)", "[2,5)"),
]
UNEQUAL = [
    ("0,1", "01"),  # a pair is no number
    ("2", "3"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("x+1", "x-1"),
    ("-5", "5"),
    (r"\sqrt[3]{8}", r"\sqrt{8}"),
    ("1/0", "2/0"),
    ("", "0"),
    ("(1,2)", "(2,1)"),
    ("9" * 200, "9" * 199 + "8"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_answers(one, other):
    assert math_answers.are_equal(one, other)
    assert math_answers.are_equal(other, one)


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_unequal_answers(one, other):
    assert not math_answers.are_equal(one, other)
    assert not math_answers.are_equal(other, one)


ROW = {
    "problem": "What is $1+1$?",
    "solution": r"It is \boxed{2}.",
    "answer": "2",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/prealgebra/1.json",
}


def test_a_file_in_math_500_s_format(tmp_path):
    path = tmp_path / "test.jsonl"
    no_answer = {key: value for key, value in ROW.items() if key not in ("answer", "unique_id")}
    path.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(no_answer)}\n")
    first, second = math500.load(str(path))
    assert (first.id, first.gold, second.id, second.gold) == (ROW["unique_id"], "2", "1", "2")
    assert math500.build_prompt(first).startswith("What is $1+1$?\n\nPlease reason step by step")
    assert math500.build_prompt(first, [second]) == (
        "Problem:\nWhat is $1+1$?\n\nSolution:\nIt is \\boxed{2}.\n\n"
        "Problem:\nWhat is $1+1$?\n\nSolution:"
    )
    assert math500.score(first.answer, first.gold).is_correct
    wrong = math500.score("I do not know", first.gold)
    assert (wrong.is_correct, wrong.is_invalid, wrong.predicted) == (False, True, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "no JSON object"),
        ('{"problem": 3, "answer": "2"}', "'problem' must be text"),
        ('{"problem": "p", "solution": "none"}', "neither an answer"),
        ("{", "test.jsonl:1 is not JSON"),
    ],
)
def test_a_bad_file_names_the_place(tmp_path, content, words):
    path = tmp_path / "test.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        math500.load(str(path))
