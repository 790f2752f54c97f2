"""`jdllm eval --task scenes`: pictures of held-out captions, judged by an oracle that reads them.

The folder of a run holds what other tasks write (`results.json`, `samples.jsonl`), every picture
(`pictures/ID.png`) and a contact sheet of the first ones, framed green or red for right or wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import pathlib
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from jdllm import errors
from jdllm.engine.images import checks
from jdllm.engine.images.engine import ImageEngine
from jdllm.eval import asking, backends, evaluation, store, sweep
from jdllm.eval.scenes import pictures, summary
from jdllm.host import progress
from jdllm.options.config import EngineConfig, from_mapping
from jdllm.tasks import registry
from jdllm.tasks.scenes import pictures as scene_pictures
from jdllm.tasks.scenes.scene import Scene

DEFAULT_LIMIT = 200
# Options of an image engine that this command has beside those of text engines.
ENGINE_FLAGS = frozenset(
    [
        "batching_max_size",
        "enable_step_cache",
        "max_image_pixels",
        "quantization",
        "warmup_resolutions",
    ]
)
SWEPT = ("num_inference_steps", "guidance_scale", "residual_diff_threshold")
OWN_FLAGS = (*SWEPT, "image_size")
# Flags that say how to write text, with their defaults.
TEXT_FLAGS: dict[str, Any] = {
    "data": None,
    "num_shots": 0,
    "shots_data": None,
    "allow_unisolated_code": False,
    "model_args": None,
    "max_new_tokens": None,
    "temperature": None,
    "dllm": [],
    "preset": None,
    "api": "chat",
}
SHEET_PICTURES, SHEET_COLUMNS, SHEET_SIDE, FRAME = 64, 8, 128, 3
RIGHT, WRONG = (40, 150, 70), (205, 40, 45)


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that only tasks of pictures have."""
    group.add_argument(
        "--num-inference-steps",
        type=int,
        metavar="N",
        help="denoising steps of every picture (default: the model's)",
    )
    group.add_argument(
        "--guidance-scale", type=float, metavar="X", help="of every picture (default: the model's)"
    )
    group.add_argument(
        "--residual-diff-threshold",
        type=float,
        metavar="X",
        help="step cache of every picture; in process with --enable-step-cache (default: none)",
    )
    group.add_argument(
        "--image-size", metavar="WIDTHxHEIGHT", help="of every picture (default: the model's)"
    )


def refuse_own_flags(options: argparse.Namespace) -> None:
    """Refuses the flags of pictures for a task of texts."""
    for name in OWN_FLAGS:
        if getattr(options, name) is not None:
            raise errors.ConfigError(f"{_flag(name)} is for --task scenes, not for {options.task}")


def run(options: argparse.Namespace, *, engine_flags: Collection[str]) -> Iterator[str]:
    """Runs the one point or the sweep of a command line; yields what to print."""
    for name, default in TEXT_FLAGS.items():
        if getattr(options, name) != default:
            raise errors.ConfigError(f"{_flag(name)} is for tasks of texts, not for scenes")
    task = registry.IMAGE_TASKS[options.task]
    points = sweep_points(options)
    given = {name: vars(options).get(name) for name in engine_flags}
    engine_options = {name: value for name, value in given.items() if value is not None}
    if options.base_url is not None and engine_options:
        raise errors.ConfigError(
            f"{_flag(next(iter(engine_options)))} is for evaluation in process; with --base-url "
            "give it to the server"
        )
    root = store.make_folder(options.output_dir)
    results = {}
    with open_backend(options, engine_options) as backend:
        size = _size(task, options, backend)
        scenes = task.load(options.limit or DEFAULT_LIMIT, size)
        for label, point in points.items():
            results[label] = evaluate(
                task,
                scenes,
                backend,
                {**point, "seed": options.seed or 0, "size": f"{size[1]}x{size[0]}"},
                output_dir=root / label if options.sweep else root,
                settings={**engine_options, "base_url": options.base_url},
                parallel=options.parallel,
            )
            head = f"\n{label}\n" if options.sweep else "\n"
            yield head + summary.lines(task, results[label])
    if options.sweep:
        name, shown = sweep.labels(results)
        csv = summary.sweep_csv(task, name, shown)
        table = summary.sweep_markdown(task, name, shown)
        yield sweep.write(root, name, shown, csv=csv, table=table, kind=sweep.PICTURES)


def sweep_points(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns label -> options of the pictures; without --sweep, one point."""
    own = {name: getattr(options, name) for name in SWEPT}
    if options.sweep is None:
        return {"run": own}
    name, _, values = options.sweep.partition("=")
    cells = [cell.strip() for cell in values.split(",") if cell.strip()]
    if name not in SWEPT or not cells:
        raise errors.ConfigError(
            f"--sweep {options.sweep!r} is not KEY=A,B,C with one of {', '.join(SWEPT)}"
        )
    if own[name] is not None:
        raise errors.ConfigError(f"--sweep and {_flag(name)} both give {name}")
    kind = int if name == "num_inference_steps" else float
    try:
        parsed = [kind(cell) for cell in cells]
    except ValueError as error:
        raise errors.ConfigError(f"--sweep {options.sweep!r}: {error}") from error
    sweep.check_distinct(name, parsed)
    return {f"{name}={cell}": {**own, name: one} for cell, one in zip(cells, parsed, strict=True)}


@contextlib.contextmanager
def open_backend(
    options: argparse.Namespace, engine_options: dict[str, Any]
) -> Iterator[pictures.Backend]:
    """Yields the one backend and shuts it down afterwards."""
    if options.base_url is not None:
        named = {"api_key": options.api_key, "timeout_s": options.timeout_s}
        given = {name: value for name, value in named.items() if value is not None}
        yield pictures.Http(options.base_url, **given)
        return
    for name in ("api_key", "timeout_s"):
        if getattr(options, name) is not None:
            raise errors.ConfigError(f"{_flag(name)} needs --base-url")
    config = from_mapping(EngineConfig, engine_options)
    logging.basicConfig(level=logging.WARNING)
    with ImageEngine(config) as engine:
        yield pictures.InProcess(engine)


def evaluate(
    task: registry.ImageTask,
    scenes: Sequence[Scene],
    backend: pictures.Backend,
    point: Mapping[str, Any],
    *,
    output_dir: pathlib.Path,
    settings: Mapping[str, Any],
    parallel: int | None = None,
) -> dict[str, Any]:
    """Makes the pictures that are missing, judges them, writes the files, returns the results.

    As with texts, an interrupted run goes on with the same command, and a folder that holds a run
    with other settings is refused.
    """
    about = backend.describe()
    of_model = backends.identity(about)
    settings = {"task": task.name, **settings, "sampling": dict(point), **of_model}
    kept = store.Store(output_dir, settings)
    kept.check_asked({scene.id for scene in scenes})
    folder = output_dir / "pictures"
    folder.mkdir(exist_ok=True)
    began_s, old = time.monotonic(), set(kept.records)
    parallel = parallel or backend.default_parallel
    missing = [(i, scene) for i, scene in enumerate(scenes) if scene.id not in old]
    made = _records(task, missing, backend, point, folder, parallel)
    try:
        with (
            contextlib.closing(made),
            progress.bar(total=len(scenes), initial=len(old), desc=task.name, unit="image") as bar,
        ):
            for record in made:
                kept.append(record)
                right = sum(one["correct"] for one in kept.records.values())
                bar.set_postfix_str(f"accuracy {right / len(kept.records):.3f}")
                bar.update()
    finally:
        new = len(kept.records) - len(old)
        if new:
            kept.add_session({"wall_time_s": time.monotonic() - began_s, "num_examples": new})
    records = [kept.records[scene.id] for scene in scenes]
    write_sheet(folder, records, output_dir / "contact.png")
    figures = summary.summarize(task, records, kept.sessions)
    results = {
        **figures,
        "config": {**settings, "parallel": parallel},
        "backend": about,
        **evaluation.surroundings(),
    }
    results |= summary.harness_fields(task, figures, results)
    kept.write_results(results)
    return results


def write_sheet(folder: pathlib.Path, records: Sequence[store.Record], path: pathlib.Path) -> None:
    """Writes the contact sheet of the first pictures; large ones are made smaller for it."""
    framed = []
    for record in records[:SHEET_PICTURES]:
        with Image.open(folder / f"{record['id']}.png") as image:
            image.thumbnail((SHEET_SIDE, SHEET_SIDE))
            small = np.asarray(image.convert("RGB"))
        height, width, _ = small.shape
        picture = np.empty((height + 2 * FRAME, width + 2 * FRAME, 3), np.uint8)
        picture[:] = RIGHT if record["correct"] else WRONG
        picture[FRAME:-FRAME, FRAME:-FRAME] = small
        framed.append(picture)
    sheet = scene_pictures.contact_sheet(framed, columns=SHEET_COLUMNS)
    Image.fromarray(sheet).save(path)


def _records(
    task: registry.ImageTask,
    missing: Sequence[tuple[int, Scene]],
    backend: pictures.Backend,
    point: Mapping[str, Any],
    folder: pathlib.Path,
    parallel: int,
) -> Generator[store.Record]:
    """Yields records as pictures come; the first failure aborts the rest."""
    asked = [
        (
            scene,
            pictures.Wanted(
                prompt=scene.caption,
                height=scene.size[0],
                width=scene.size[1],
                seed=point["seed"] + index,
                num_inference_steps=point["num_inference_steps"],
                guidance_scale=point["guidance_scale"],
                residual_diff_threshold=point["residual_diff_threshold"],
            ),
        )
        for index, scene in missing
    ]
    answered = asking.in_threads(
        lambda one: pictures.timed(backend, one[1]),
        asked,
        parallel=parallel,
        name=lambda one: f"scene {one[0].id}",
        abort=backend.abort,
    )
    with contextlib.closing(answered):
        for (scene, wanted), (made, latency_s) in answered:
            # Before its record: a record says that there is a picture.
            Image.fromarray(made.picture).save(folder / f"{scene.id}.png")
            steps = wanted.num_inference_steps or backend.default_steps
            yield judged(task, scene, made, seed=wanted.seed, steps=steps, latency_s=latency_s)


def judged(
    task: registry.ImageTask,
    scene: Scene,
    made: pictures.Made,
    *,
    seed: int,
    steps: int,
    latency_s: float,
) -> store.Record:
    """Returns the record of a picture: the oracle's verdict, and each kind of fact by itself.

    `nfe` counts the steps that ran the whole transformer.
    """
    facts = scene.facts()
    verdict = task.check(facts, made.picture)
    return {
        "id": scene.id,
        "prompt": scene.caption,
        "seed": seed,
        "correct": verdict.is_right,
        "wrong": list(verdict.wrong),
        "kinds": task.by_kind(facts, verdict.reading),
        "invalid": verdict.reading.ground is None or not verdict.reading.shapes,
        "nfe": steps - made.skipped_steps,
        "latency": latency_s,
    }


def _size(
    task: registry.ImageTask, options: argparse.Namespace, backend: pictures.Backend
) -> tuple[int, int]:
    """Returns the (height, width) of all pictures."""
    found = backend.default_size
    if options.image_size is not None:
        try:
            given = checks.size_of(options.image_size)
        except errors.RequestError as error:
            raise errors.ConfigError(f"--image-size: {error}") from error
        found = backend.default_size if given is None else (given[1], given[0])
    try:
        task.check_size(found)
    except ValueError as error:
        raise errors.ConfigError(f"scenes cannot be drawn at {found[1]}x{found[0]}: {error}; give "
                                 "another --image-size") from error  # fmt: skip
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
