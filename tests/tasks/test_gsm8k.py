"""Loading, prompts and scoring of GSM8K-format tasks."""

import json

import pytest

from jdllm.tasks import example, gsm8k
from jdllm.tasks.registry import TASKS


@pytest.mark.parametrize(
    ("output", "gold", "correct"),
    [
        ("Tom has 12 apples.\n#### 12", "12", True),
        ("#### 1,234", "1234", True),
        ("#### $18.", "18", True),
        ("#### 18.00", "18", True),
        ("#### -3", "-3", True),
        ("#### 12\nQuestion: 5 + 5? #### 10", "12", True),
        ("so she pays $1,018 in all.", "1018", True),
        ("7 + 5 = <<7+5=12>>12 apples", "12", True),
        ("the answer is 13", "12", False),
        ("#### 12 but 13 is wrong", "13", False),
    ],
)
def test_scores(output, gold, correct):
    score = example.score(output, gold)
    assert score.is_correct is correct
    assert not score.is_invalid


@pytest.mark.parametrize("output", ["", "no idea", "#### ?"])
def test_an_output_without_a_number_is_invalid_and_wrong(output):
    assert example.score(output, "3") == example.Score(
        is_correct=False, is_invalid=True, predicted=None
    )


def test_load_reads_questions_and_golds_in_order(tmp_path):
    rows = [{"question": f"Q{i}?", "answer": f"work <<1+{i}=2>>\n#### {i},000"} for i in range(3)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    loaded = gsm8k.load(str(path), 2)
    assert [(e.id, e.question, e.gold) for e in loaded] == [
        ("0", "Q0?", "0000"),
        ("1", "Q1?", "1000"),
    ]
    assert example.score("#### 1000", loaded[1].gold).is_correct


def test_a_row_without_gold_names_file_and_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"question": "Q", "answer": "3"}) + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:1: no number"):
        gsm8k.load(str(path))


def test_few_shot_prompt_holds_worked_shots_and_ends_with_answer():
    shot = example.Example(id="a", question="1+1?", gold="2", answer="2\n#### 2")
    asked = example.Example(id="b", question="2+2?", gold="4")
    assert gsm8k.build_prompt(asked, [shot]) == (
        "Question: 1+1?\nAnswer: 2\n#### 2\n\nQuestion: 2+2?\nAnswer:"
    )
    assert gsm8k.build_prompt(asked) == "2+2?"


def test_registry_names_agree():
    assert all(task.name == name for name, task in TASKS.items())
    assert TASKS["arithmetic"].load(None, 2)[0].gold.isdigit()
