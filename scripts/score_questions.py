"""Asks a model a list of questions and prints how many it answers right, and never a question.

    python scripts/score_questions.py questions.jsonl --model-path jdllm-nano

A line of the file is a JSON object with `question`, `answer` (a number), `steps` (how many) and
`operations`, one of + - * / for each step, such as "*-". The accuracy is that of all questions, of
those with as many steps, and of those with the same last operation; ± is its standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import jdllm
from jdllm.tasks import example


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line of the file; `last` is the operation that gives the answer."""

    text: str
    gold: str
    steps: int
    last: str


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, asks all questions, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--model-path", help="default: the bundled jdllm-nano")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threshold", type=float, help="default: the model's own")
    args = parser.parse_args(argv)
    questions = read(args.file)
    llm = jdllm.LLM(
        model=args.model_path,
        dtype=args.dtype,
        context_length=args.context_length,
        max_running_requests=args.max_running_requests,
        log_level="warning",
    )
    dllm = {} if args.threshold is None else {"threshold": args.threshold}
    try:
        replies = llm.chat(
            [[{"role": "user", "content": question.text}] for question in questions],
            {"max_new_tokens": args.max_new_tokens, "temperature": 0.0, "dllm": dllm},
            use_tqdm=sys.stderr.isatty(),
        )
    finally:
        llm.shutdown()
    is_right = [
        example.score(reply.outputs[0].text, question.gold).is_correct
        for reply, question in zip(replies, questions, strict=True)
    ]
    for line in table(questions, is_right):
        sys.stdout.write(f"{line}\n")


def read(path: pathlib.Path) -> list[Question]:
    """Returns the questions of a file; a wrong line is named by its number only."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            gold, operations = str(row["answer"]), str(row["operations"])
            float(gold.replace(",", ""))
            if len(operations) != row["steps"] or not set(operations) <= set("+-*/"):
                raise ValueError
            question = Question(
                text=row["question"], gold=gold, steps=row["steps"], last=operations[-1]
            )
        except (ValueError, KeyError, TypeError, IndexError):
            raise SystemExit(f"{path}:{number} is no question as --help describes it") from None
        questions.append(question)
    if not questions:
        raise SystemExit(f"{path} has no questions")
    return questions


def table(questions: Sequence[Question], is_right: Sequence[bool]) -> Iterator[str]:
    """Yields lines: all questions, then by the number of steps, then by the last operation."""
    yield f"{'all':8s} {sum(is_right):4d} of {len(is_right):4d}  {share(is_right)}"
    keys: dict[str, Callable[[Question], str]] = {
        "steps ": lambda one: str(one.steps),
        "last ": lambda one: one.last,
    }
    for label, key in keys.items():
        groups: dict[str, list[bool]] = {}
        for question, right in zip(questions, is_right, strict=True):
            groups.setdefault(key(question), []).append(right)
        for name, group in sorted(groups.items()):
            yield f"{label + name:8s} {sum(group):4d} of {len(group):4d}  {share(group)}"


def share(is_right: Sequence[bool]) -> str:
    """Returns the share of right ones in percent, with the standard error of its mean."""
    n, mean = len(is_right), sum(is_right) / len(is_right)
    error = f"{100 * math.sqrt(mean * (1 - mean) / (n - 1)):.1f}" if n > 1 else "?"
    return f"{100 * mean:.1f} % ± {error}"


if __name__ == "__main__":
    main()
