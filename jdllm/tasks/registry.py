"""The tasks that `jdllm.eval` knows, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jdllm.tasks import example, gsm8k
from jdllm.tasks.example import Example, Score


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The functions of a task: `load(path, limit)`, `build_prompt(example, shots)`, `score`."""

    name: str
    load: Callable[[str | None, int | None], list[Example]]
    build_prompt: Callable[[Example, Sequence[Example]], str]
    score: Callable[[str, str], Score]


TASKS: dict[str, Task] = {
    "gsm8k": Task(
        name="gsm8k", load=gsm8k.load, build_prompt=gsm8k.build_prompt, score=example.score
    ),
    "arithmetic": Task(
        name="arithmetic",
        load=gsm8k.load_arithmetic,
        build_prompt=gsm8k.build_prompt,
        score=example.score,
    ),
}
