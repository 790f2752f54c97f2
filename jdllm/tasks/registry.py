"""The tasks that `jdllm.eval` knows, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jdllm.tasks import code, example, gsm8k, math500
from jdllm.tasks.example import Example, Score
from jdllm.tasks.scenes import drawing, generator, oracle
from jdllm.tasks.scenes.scene import Scene


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The functions of a task, all pure but `load(path, limit)`.

    An output is scored by `score(output, gold)`, or it becomes a `program(output, example)` that
    must run to its end; without either nothing is judged. `data` says what file the task needs, and
    `metric` names its score as lm-eval does. With shots, an answer ends at `few_shot_stop`: a base
    model would go on with more questions.
    """

    name: str
    load: Callable[[str | None, int | None], list[Example]]
    build_prompt: Callable[[Example, Sequence[Example]], str]
    score: Callable[[str, str], Score] | None = None
    program: Callable[[str, Example], str] | None = None
    data: str | None = None
    metric: str = "exact_match"
    few_shot_stop: tuple[str, ...] = ("Question:",)
    version: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageTask:
    """A task whose answers are pictures.

    `load(number, (height, width))` returns scenes that training never shows, `check` judges a
    picture, and `by_kind` says which kinds of facts it shows. `check_size` raises ValueError for a
    (height, width) that the task cannot have.
    """

    name: str
    load: Callable[[int, tuple[int, int]], list[Scene]]
    check: Callable[..., oracle.Verdict]
    by_kind: Callable[..., dict[str, bool]]
    check_size: Callable[[tuple[int, int]], None]
    kinds: tuple[str, ...]
    metric: str = "accuracy"
    version: int = 1


TASKS: dict[str, Task] = {
    "gsm8k": Task(
        name="gsm8k",
        load=gsm8k.load,
        build_prompt=gsm8k.build_prompt,
        score=example.score,
        data="GSM8K's test.jsonl (lines with question and answer)",
    ),
    "math500": Task(
        name="math500",
        load=math500.load,
        build_prompt=math500.build_prompt,
        score=math500.score,
        data="MATH-500's test.jsonl (lines with problem, solution and answer)",
        few_shot_stop=("Problem:",),
    ),
    "humaneval": Task(
        name="humaneval",
        load=code.load_humaneval,
        build_prompt=code.build_humaneval_prompt,
        program=code.humaneval_program,
        data="HumanEval.jsonl or HumanEval.jsonl.gz",
        metric="pass@1",
        few_shot_stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    ),
    "mbpp": Task(
        name="mbpp",
        load=code.load_mbpp,
        build_prompt=code.build_mbpp_prompt,
        program=code.mbpp_program,
        data="mbpp.jsonl or sanitized-mbpp.json",
        metric="pass@1",
        few_shot_stop=("You are an expert", "[DONE]"),
    ),
    "arithmetic": Task(
        name="arithmetic",
        load=gsm8k.load_arithmetic,
        build_prompt=gsm8k.build_prompt,
        score=example.score,
    ),
}

IMAGE_TASKS: dict[str, ImageTask] = {
    "scenes": ImageTask(
        name="scenes",
        load=lambda number, size: [
            generator.generate(index, split="test", size=size) for index in range(number)
        ],
        check=oracle.check,
        by_kind=oracle.by_kind,
        check_size=drawing.check_size,
        kinds=oracle.KINDS,
    ),
}
