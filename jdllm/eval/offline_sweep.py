"""`jdllm.sweep`: what each setting of denoising options costs, as a table, from Python.

It is `jdllm eval --sweep` for an engine that runs already: the same questions, files and figures.
It stands here and not on `Engine`, because the engine knows nothing of tasks and their scores.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from jdllm import errors
from jdllm.engine.engine import Engine
from jdllm.eval import backends, evaluation, summary
from jdllm.eval import sweep as sweep_files
from jdllm.options import sampling_params
from jdllm.tasks import registry
from jdllm.tasks.example import Example

DEFAULT_LIMIT = 100  # questions of a task; some tasks have no end


class Table(list[dict[str, Any]]):
    """One row per setting: its options, then `summary.SWEEP_COLUMNS` (None: not measured).

    Shares are between 0 and 1. `pandas.DataFrame(table)` takes it as it is; printed, and in a
    notebook, it is a table with the sweep's AUP.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], markdown: str):
        super().__init__(rows)
        self._markdown = markdown

    def __str__(self) -> str:
        return self._markdown

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = self._markdown.strip().splitlines()
        cells = [
            [html.escape(cell.strip()) for cell in line.strip("|").split("|")]
            for line in lines
            if line.startswith("|") and not line.startswith("|---")
        ]
        rows = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells[1:]]
        head = "".join(f"<th>{cell}</th>" for cell in cells[0])
        below = "".join(f"<p>{html.escape(x)}</p>" for x in lines if x and not x.startswith("|"))
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>{below}"


def sweep(
    engine: Engine,
    questions: str | Sequence[str],
    options: Mapping[str, Sequence[Any]],
    *,
    sampling: Mapping[str, Any] | None = None,
    limit: int | None = None,
    num_shots: int = 0,
    data: str | None = None,
    parallel: int | None = None,
    output_dir: str | pathlib.Path | None = None,
) -> Table:
    """Returns a row of figures for each combination of the values of denoising options.

    `questions` is the name of a task (its first `limit` questions, default 100; `num_shots` and
    `data` as for `jdllm eval`), or a list of prompts, which have no accuracy. A prompt goes through
    the chat template if there is one. `sampling` has keys of `SamplingParams`; without a
    temperature answers are greedy. With an `output_dir` the answers of each setting are kept there,
    the same call goes on where a stopped one ended, and there are the files of `jdllm eval --sweep`
    (sweep.csv, summary.md, plots). Raises ConfigError or RequestError before the first answer.
    """
    asked = _questions(questions, limit, num_shots, data)
    points = _points(options, sampling or {})
    backend = backends.InProcess(engine)
    results = {}
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(output_dir or stack.enter_context(tempfile.TemporaryDirectory()))
        for values, one in points.items():
            label = ",".join(map("=".join, zip(options, map(str, values), strict=True)))
            results[values] = evaluation.evaluate(
                asked, backend, one, output_dir=root / label, settings={}, parallel=parallel
            )
        name = ",".join(options)
        shown = {",".join(map(str, values)): one for values, one in results.items()}
        markdown = summary.sweep_markdown(name, shown)
        if output_dir is not None:
            csv = summary.sweep_csv(name, shown)
            markdown = sweep_files.write(
                root, name, shown, csv=csv, table=markdown, kind=sweep_files.TEXT
            )
    rows = [
        dict(zip(options, values, strict=True)) | {key: one[key] for key in summary.SWEEP_COLUMNS}
        for values, one in results.items()
    ]
    return Table(rows, markdown.lstrip("\n"))


def _questions(
    questions: str | Sequence[str], limit: int | None, num_shots: int, data: str | None
) -> evaluation.Questions:
    if isinstance(questions, str):
        if questions not in registry.TASKS:
            raise errors.ConfigError(
                f"unknown task {questions!r}{errors.nearest(questions, registry.TASKS)}; "
                "give prompts of your own as a list"
            )
        if registry.TASKS[questions].program is not None:
            raise errors.ConfigError(
                f"task {questions} runs programs that the model writes: use jdllm eval --sweep, "
                "which isolates them"
            )
        if limit is not None and limit < 1:
            raise errors.ConfigError(f"{limit=} must be a positive number of questions")
        return evaluation.load_questions(
            questions, data=data, limit=limit or DEFAULT_LIMIT, num_shots=num_shots
        )
    for name, value in (("num_shots", num_shots or None), ("data", data), ("limit", limit)):
        if value is not None:
            raise errors.ConfigError(f"{name} is for tasks, not for a list of prompts")
    if not questions:
        raise errors.ConfigError("a sweep needs a prompt")
    return evaluation.Questions(
        task=registry.Task(
            name="prompts", load=lambda *_: [], build_prompt=lambda example, _: example.question
        ),
        examples=[
            Example(id=str(i), question=question, gold="") for i, question in enumerate(questions)
        ],
        shots=[],
        settings={"task": "prompts", "prompts": list(questions)},
    )


def _points(
    options: Mapping[str, Sequence[Any]], sampling: Mapping[str, Any]
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns values of the options -> sampling parameters, each checked by the engine's rules."""
    if not options or not all(options.values()):
        raise errors.ConfigError("a sweep needs an option with at least one value")
    fixed = dict(sampling.get("dllm", {}))
    if twice := fixed.keys() & options.keys():
        raise errors.ConfigError(f"sampling and the sweep both give {min(twice)}")
    for name, values in options.items():
        sweep_files.check_distinct(name, values)
    points = {}
    for values in itertools.product(*options.values()):
        dllm = fixed | dict(zip(options, values, strict=True))
        points[values] = {"temperature": 0.0, **sampling, "dllm": dllm}
        sampling_params.SamplingParams.from_mapping(points[values])
    return points
