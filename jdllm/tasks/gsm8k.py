"""Loads files in GSM8K's format, or generated problems, and builds the few-shot prompt.

A file consists of JSON lines with `question` and `answer`; the gold number follows `####`.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence

from jdllm.tasks import arithmetic
from jdllm.tasks.example import Example, extract_answer


def load(path: str | None, limit: int | None = None) -> list[Example]:
    """Returns the first `limit` examples of a JSON-lines file."""
    if path is None:
        raise ValueError("task gsm8k needs a data file in GSM8K's format (question, answer)")
    examples = []
    with pathlib.Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, limit)):
            row = json.loads(line)
            gold = extract_answer(row["answer"]) if "####" in row["answer"] else None
            if gold is None:
                raise ValueError(f"{path}:{number + 1}: no number after '####' in the answer")
            examples.append(
                Example(id=str(number), question=row["question"], gold=gold, answer=row["answer"])
            )
    return examples


def load_arithmetic(path: str | None, limit: int | None = None) -> list[Example]:
    """Returns the problems of a file, or `limit` generated held-out ones (500 by default)."""
    if path is not None:
        return load(path, limit)
    problems = itertools.islice(arithmetic.problems("test"), 500 if limit is None else limit)
    return [Example(id=p.id, question=p.question, gold=p.gold, answer=p.answer) for p in problems]


def build_prompt(example: Example, shots: Sequence[Example] = ()) -> str:
    """Returns the few-shot prompt of SGLang and lm-eval, or the bare question without shots."""
    if not shots:
        return example.question
    parts = [f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots]
    return "".join([*parts, f"Question: {example.question}\nAnswer:"])
