"""One evaluation run: reads examples, asks for answers, scores and writes each as it finishes.

grain reads the examples and skips finished ids, and threads call the backend (`asking.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import grain

from jdllm import errors, version
from jdllm.eval import asking, backends, sandbox, store, summary
from jdllm.host import progress
from jdllm.tasks import registry
from jdllm.tasks.example import Example, Score

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "grain")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The examples of a run, and the solved examples (shots) that stand before each question."""

    task: registry.Task
    examples: Sequence[Example]
    shots: Sequence[Example]
    settings: dict[str, Any]

    def prompt(self, example: Example) -> str:
        return self.task.build_prompt(example, self.shots)


def load_questions(
    name: str,
    *,
    data: str | None = None,
    limit: int | None = None,
    num_shots: int = 0,
    shots_data: str | None = None,
) -> Questions:
    """Reads a task; the first examples are the shots and are not asked.

    With `shots_data` the shots come from another file (GSM8K's train.jsonl) instead.
    """
    if name not in registry.TASKS:
        raise errors.ConfigError(f"unknown task {name!r}{errors.nearest(name, registry.TASKS)}")
    task = registry.TASKS[name]
    if task.data is not None and data is None:
        raise errors.ConfigError(f"task {name} needs --data FILE: {task.data}")
    own_shots = num_shots if shots_data is None else 0
    wanted = None if limit is None else limit + own_shots
    shots = [] if shots_data is None else _load(task, shots_data, num_shots)
    loaded = _load(task, data, wanted)
    shots += loaded[:own_shots]
    if len(shots) < num_shots or len(loaded) <= own_shots:
        raise errors.ConfigError(
            f"{num_shots=} with {len(loaded)} examples leaves no question to ask"
        )
    repeated = [
        id_ for id_, count in collections.Counter(e.id for e in loaded).items() if count > 1
    ]
    if repeated:
        raise errors.ConfigError(f"{data} has more than one example {errors.quote(repeated[0])}")
    settings = {
        "task": name,
        "data_sha256": None if data is None else _sha256(data),
        "num_shots": num_shots,
        "shots_sha256": None if shots_data is None else _sha256(shots_data),
    }
    return Questions(task=task, examples=loaded[own_shots:], shots=shots, settings=settings)


def evaluate(
    questions: Questions,
    backend: backends.Backend,
    sampling: dict[str, Any],
    *,
    output_dir: str | pathlib.Path,
    settings: dict[str, Any],
    parallel: int | None = None,
    programs: sandbox.Sandbox | None = None,
) -> dict[str, Any]:
    """Asks the questions without an answer, writes the files and returns `results.json`.

    `settings` holds what else identifies the run; a folder with other settings is refused.
    `programs` runs the programs of a code task.
    """
    if questions.shots:
        sampling = {**sampling, "stop": list(questions.task.few_shot_stop)}
    about = backend.describe()
    of_model = backends.identity(about)
    settings = {**questions.settings, **settings, "sampling": sampling, **of_model}
    kept = store.Store(output_dir, settings)
    asked = {example.id for example in questions.examples}
    kept.check_asked(asked)
    began, old = time.monotonic(), set(kept.records)
    parallel = parallel or backend.default_parallel
    answers = _answers(questions, backend, sampling, kept.records, parallel, programs)
    try:
        with (
            contextlib.closing(answers),
            progress.bar(
                total=len(asked), initial=len(old), desc=questions.task.name, unit="q"
            ) as bar,
        ):
            for record in answers:
                kept.append(record)
                bar.set_postfix_str(_progress(kept.records))
                bar.update()
    finally:
        new = [record for id_, record in kept.records.items() if id_ not in old]
        if new:
            kept.add_session(
                {
                    "wall_time_s": time.monotonic() - began,
                    "num_examples": len(new),
                    "completion_tokens": sum(record["completion_tokens"] for record in new),
                }
            )
    records = [kept.records[example.id] for example in questions.examples]
    figures = summary.summarize(records, kept.sessions)
    results = {
        **figures,
        "config": {**settings, "parallel": parallel},
        "backend": about,
        **surroundings(),
    }
    results |= summary.harness_fields(questions.task, len(questions.shots), figures, results)
    kept.write_results(results)
    return results


def surroundings() -> dict[str, Any]:
    """Returns the versions, the machine and the commit of this run."""
    return {
        "versions": {
            "jdllm": version.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "cpu_count": os.cpu_count(),
        },
        "git_commit": _git_commit(pathlib.Path(__file__).resolve().parents[2]),
    }


def _answers(
    questions: Questions,
    backend: backends.Backend,
    sampling: dict[str, Any],
    finished: Iterable[str],
    parallel: int,
    programs: sandbox.Sandbox | None,
) -> Generator[store.Record]:
    """Yields records as answers come; the first failure aborts the rest."""
    finished = frozenset(finished)
    dataset = (
        grain.MapDataset.source(questions.examples)
        .filter(lambda example: example.id not in finished)
        .map(lambda example: (example, questions.prompt(example)))
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
    task = questions.task

    def ask(wanted: tuple[Example, str]) -> tuple[backends.Answer, sandbox.Outcome | None]:
        """Returns the answer, and for a code task what its program did."""
        example, prompt = wanted
        answer = backend.answer(prompt, sampling)
        if task.program is None:
            return answer, None
        assert programs is not None, "a code task has a sandbox"
        return answer, programs.run(task.program(answer.text, example))

    answered = asking.in_threads(
        ask,
        dataset,
        parallel=parallel,
        name=lambda wanted: f"example {wanted[0].id}",
        abort=backend.abort,
    )
    with contextlib.closing(answered):
        for (example, prompt), (answer, outcome) in answered:
            yield _record(example, prompt, answer, _score(task, example, answer.text, outcome))


def _score(
    task: registry.Task, example: Example, text: str, outcome: sandbox.Outcome | None
) -> Score | None:
    """Returns the score of an answer, None if its task judges nothing."""
    if outcome is None:
        return None if task.score is None else task.score(text, example.gold)
    predicted = "passed" if outcome.passed else outcome.message
    return Score(is_correct=outcome.passed, is_invalid=not text.strip(), predicted=predicted)


def _record(
    example: Example, prompt: str, answer: backends.Answer, score: Score | None
) -> store.Record:
    return {
        "id": example.id,
        "prompt": prompt,
        "output": answer.text,
        "gold": example.gold,
        "pred": None if score is None else score.predicted,
        "correct": None if score is None else score.is_correct,
        "invalid": None if score is None else score.is_invalid,
        "nfe": answer.nfe,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "latency": answer.latency_s,
    }


def _progress(records: dict[str, store.Record]) -> str:
    done = records.values()
    nfe = sum(record["nfe"] or 0 for record in done)
    tokens = sum(record["completion_tokens"] for record in done)
    speed = f"TPF {tokens / max(nfe, 1):.2f}"
    accuracy = summary.share_of(list(done), "correct")
    return speed if accuracy is None else f"accuracy {accuracy:.3f}, {speed}"


def _load(task: registry.Task, path: str | None, limit: int | None) -> list[Example]:
    try:
        return task.load(path, limit)
    except UnicodeDecodeError as error:  # its repr has the whole file
        raise errors.ConfigError(
            f"cannot read {path} as {task.name} data: it is no UTF-8 text ({error.reason})"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.ConfigError(f"cannot read {path} as {task.name} data: {error!r}") from error


def _sha256(path: str) -> str:
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def _git_commit(root: pathlib.Path) -> str | None:
    """Returns the commit of this code's checkout, None if the code is an installed package."""
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
