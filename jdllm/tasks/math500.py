r"""MATH-500: competition problems whose answer stands in the last `\boxed{}` of the output.

A file has JSON lines with `problem`, `solution`, `answer`, `subject`, `level` and `unique_id`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdllm.tasks import math_answers, records
from jdllm.tasks.example import Example, Score

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def load(path: str | None, limit: int | None = None) -> list[Example]:
    """Returns the first `limit` problems; without `answer`, the solution's last box is gold."""
    if path is None:
        raise ValueError("task math500 needs a data file: MATH-500's test.jsonl")
    examples = []
    for number, row in enumerate(records.read(path, limit)):
        place = f"{path}: record {number + 1}"
        solution = records.text_of({"solution": ""} | row, "solution", place)
        gold = row.get("answer", math_answers.last_boxed(solution))
        if not isinstance(gold, str):
            raise ValueError(f"{place}: neither an answer nor a boxed one in the solution")
        examples.append(
            Example(
                id=str(row.get("unique_id", number)),
                question=records.text_of(row, "problem", place),
                gold=gold,
                answer=solution,
            )
        )
    return examples


def build_prompt(example: Example, shots: Sequence[Example] = ()) -> str:
    """Returns the instruction that instruct models are asked with, or Minerva's few-shot prompt."""
    if not shots:
        return f"{example.question}\n\n{INSTRUCTION}"
    parts = [f"Problem:\n{shot.question}\n\nSolution:\n{shot.answer}\n\n" for shot in shots]
    return "".join([*parts, f"Problem:\n{example.question}\n\nSolution:"])


def score(output: str, gold: str) -> Score:
    """Compares the final answer of an output with the gold one; see `math_answers`."""
    predicted = math_answers.final_answer(output)
    is_correct = predicted is not None and math_answers.are_equal(predicted, gold)
    return Score(is_correct=is_correct, is_invalid=predicted is None, predicted=predicted)
