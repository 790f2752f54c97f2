"""HumanEval and MBPP: programs that must pass tests, and how an output becomes a program.

HumanEval's file has JSON lines, often gzipped, with `task_id`, `prompt`, `entry_point`,
`canonical_solution` and `test`. MBPP's has `task_id`, `text` (sanitized: `prompt`), `code`,
`test_list`, and `test_setup_code` (sanitized: `test_imports`); the sanitized one is a JSON list.

`program` is pure: it returns the text that a sandbox runs. An example's `gold` is what follows the
output in that program, and its `answer` is the published solution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jdllm.tasks import records
from jdllm.tasks.example import Example

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# What a base model writes after the function that was asked for (HumanEval's stops).
_AFTER_FUNCTION = re.compile(r"^(?:class|def|#|if|print|@|assert)\b|^#|^```", re.MULTILINE)
_MBPP_TEST_LINES = 3  # shown in the prompt


def load_humaneval(path: str | None, limit: int | None = None) -> list[Example]:
    """Returns the first `limit` problems; `question` is the beginning of the function."""
    if path is None:
        raise ValueError("task humaneval needs a data file: HumanEval.jsonl or HumanEval.jsonl.gz")
    examples = []
    for number, row in enumerate(records.read(path, limit)):
        place = f"{path}: record {number + 1}"
        test, entry = (records.text_of(row, name, place) for name in ("test", "entry_point"))
        if not entry.isidentifier():
            raise ValueError(f"{place}: entry_point {entry[:80]!r} is no name")
        examples.append(
            Example(
                id=records.text_of(row, "task_id", place),
                question=records.text_of(row, "prompt", place),
                gold=f"{test}\n\ncheck({entry})\n",
                answer=records.text_of(
                    {"canonical_solution": ""} | row, "canonical_solution", place
                ),
            )
        )
    return examples


def load_mbpp(path: str | None, limit: int | None = None) -> list[Example]:
    """Returns the first `limit` problems; `question` is the task and its first tests."""
    if path is None:
        raise ValueError("task mbpp needs a data file: mbpp.jsonl or sanitized-mbpp.json")
    examples = []
    for number, row in enumerate(records.read(path, limit)):
        place = f"{path}: record {number + 1}"
        text = records.text_of(row, "text" if "text" in row else "prompt", place)
        tests = _texts(row, "test_list", place)
        if not tests:
            raise ValueError(f"{place}: test_list is empty")
        setup = [row["test_setup_code"]] if row.get("test_setup_code") else []
        setup += _texts({"test_imports": []} | row, "test_imports", place)
        shown = "\n".join(tests[:_MBPP_TEST_LINES])
        examples.append(
            Example(
                id=str(row.get("task_id", number)),
                question=f"{text}\nYour code should pass these tests:\n{shown}",
                gold="\n".join([*setup, *tests, ""]),
                answer=records.text_of({"code": ""} | row, "code", place).replace("\r\n", "\n"),
            )
        )
    return examples


def build_humaneval_prompt(example: Example, shots: Sequence[Example] = ()) -> str:
    """Returns the instruction of lm-eval's `humaneval_instruct`; with shots, plain code."""
    if shots:
        return "".join([*(f"{shot.question}{shot.answer}\n\n" for shot in shots), example.question])
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{example.question}\n```\n"
    )


def build_mbpp_prompt(example: Example, shots: Sequence[Example] = ()) -> str:
    """Returns the instruction of the MBPP paper, with solved examples before it."""
    begin = "You are an expert Python programmer, and here is your task: "
    parts = [f"{begin}{shot.question}\n```python\n{shot.answer}\n```\n\n" for shot in shots]
    return "".join([*parts, f"{begin}{example.question}\n"])


def humaneval_program(output: str, example: Example) -> str:
    """Returns the function and its tests.

    A fenced block counts if there is one: the last that defines the function, or else the last.
    A block or an output without the function's `def` is the rest of the prompt's function.
    """
    name = re.findall(r"^check\((\w+)\)$", example.gold, re.MULTILINE)[-1]
    is_whole = re.compile(rf"^(?:async )?def {name}\b", re.MULTILINE)
    blocks = fenced_blocks(output)
    whole = [block for block in blocks if is_whole.search(block)]
    if whole or (not blocks and is_whole.search(output)):
        # The prompt brings imports and helper functions that the answer may leave out.
        return "\n".join([f"{example.question}    pass\n", (whole or [output])[-1], example.gold])
    return "\n".join([example.question + _body(blocks[-1] if blocks else output), example.gold])


def mbpp_program(output: str, example: Example) -> str:
    """Returns the output's fenced blocks, or the whole output, and the tests."""
    text = output.split("[DONE]")[0].removeprefix("[BEGIN]\n")
    return "\n".join(["\n".join(fenced_blocks(text)) or text, example.gold])


def fenced_blocks(text: str) -> list[str]:
    """Returns the contents of Markdown's fenced blocks; the last may lack its end."""
    return _FENCE.findall(text)


def _body(text: str) -> str:
    """Returns a function's body: up to its end, or indented if a chat model left that out."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    if first.startswith((" ", "\t")):
        end = _AFTER_FUNCTION.search(text)
        return text[: end.start()] if end else text
    return "\n".join(f"    {line}" if line.strip() else line for line in text.split("\n"))


def _texts(row: dict[str, object], name: str, place: str) -> list[str]:
    values = row.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{place}: field {name!r} must be a list of texts")
    return values
