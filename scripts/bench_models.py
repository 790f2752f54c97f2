"""Measures models of full size with random weights: one table, each figure beside its floor.

    python scripts/bench_models.py --tp-size 4
    python scripts/bench_models.py --tp-size 2 --parts sums mini llada-8b canvas
    python scripts/bench_models.py --tp-size 1 --parts sdar-8b sdar-8b-4 --together 0.45 0.45

The parts run one after the other, each in a process of its own. By default they are those of models
split over the GPUs of a host:

  sums       the kernel that sums over GPUs, and XLA's (`bench_collectives.py`)
  flash      LLaDA2.0-flash through the engine (`jdllm bench one-batch`), whole experts on each GPU
  slices     the same with every expert cut (`--ep-size 1`)
  mini       LLaDA2.0-mini likewise
  llada-8b   a model of LLaDA-8B's shapes, every layer dense, likewise
  canvas     LLaDA-8B with replayed acceptance (`bench_canvas.py`)
  images     one step of Z-Image and of FLUX.1 (`bench_image_parts.py`)
  soak       minutes of random requests with aborts and disconnects (`soak.py`)

Other families through the engine: sdar-8b (blocks of 32), sdar-8b-4 (blocks of 4), sdar-30b-a3b,
fast-dllm-v2-7b, nemotron-8b, diffusion-gemma. The threshold 0.95 means one token a forward with
random weights, 0 a whole block; DiffusionGemma has none, and takes 8 steps for each of 2 canvases.

With `--together SHARE ...` the text models, each with this share of the GPUs' memory, compile at
the same time and measure in turn (`one_batch_in_turn.py`).

A part that fails, or outlasts `--limit-s`, says so and the next one begins. Output of the parts
goes to `--log-dir`; the table has milliseconds per forward at `--input-len` tokens of context (the
bench writes `--output-len` more) and the floor of one GPU's share of bytes and FLOPs (`floors.py`),
to which sums over GPUs come: two a layer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import child_process
import floors
import one_batch_in_turn

from jdllm.bench import tables
from jdllm.models import loading

SCRIPTS = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A model that the engine serves, and how it is measured."""

    config: str
    block: int | None = 32  # tokens of a row in flight; None for the model's own canvas
    output_len: int | None = None  # for --output-len
    flags: tuple[str, ...] = ()


MODELS = {
    "flash": TextModel(config="configs/llada2.0-flash"),
    "slices": TextModel(config="configs/llada2.0-flash", flags=("--ep-size", "1")),
    "mini": TextModel(config="configs/llada2.0-mini"),
    "llada-8b": TextModel(config="configs/bench/llada-8b-shapes"),
    "sdar-8b": TextModel(config="configs/sdar-8b"),
    "sdar-8b-4": TextModel(config="configs/sdar-8b", block=4),
    "sdar-30b-a3b": TextModel(config="configs/sdar-30b-a3b"),
    "fast-dllm-v2-7b": TextModel(config="configs/fast-dllm-v2-7b"),
    "nemotron-8b": TextModel(config="configs/nemotron-labs-diffusion-8b"),
    "diffusion-gemma": TextModel(
        config="configs/diffusion-gemma-26b-a4b",
        block=None,
        output_len=512,
        flags=("--dllm", "max_denoising_steps=8"),
    ),
}
SEVERAL_GPUS = ("sums", "flash", "slices", "mini", "llada-8b", "canvas", "images", "soak")
PARTS = tuple(dict.fromkeys([*SEVERAL_GPUS, *MODELS]))
PIPELINES = ("z-image-turbo", "flux-1-dev")


def main() -> None:
    """Parses the command line, runs the parts, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp-size", type=int, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(SEVERAL_GPUS))
    parser.add_argument("--batch-size", nargs="+", default=["1", "4", "16", "64"])
    parser.add_argument("--threshold", nargs="+", default=["0.95", "0"])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--skews", type=int, default=1000)
    parser.add_argument("--soak-minutes", type=float, default=5.0)
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="of a part, or of those together"
    )
    parser.add_argument("--log-dir", type=pathlib.Path, default=pathlib.Path("runs/bench-models"))
    parser.add_argument("--together", nargs="+", metavar="SHARE", help="of the GPUs' memory")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="to text models")
    args = parser.parse_args()
    args.log_dir.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        for old in (log_of(part, args), server_log_of(part, args), result_of(part, args)):
            old.unlink(missing_ok=True)
    if args.together:
        run_together([part for part in args.parts if part in MODELS], args)
    for part in args.parts:
        if args.together and part in MODELS:
            show(part, args)
            continue
        began = time.monotonic()
        log = log_of(part, args)
        ends = [run(command, log, args.limit_s) for command in commands(part, args)]
        tables.say(f"## {part}: {', '.join(ends)} after {time.monotonic() - began:.0f} s, {log}")
        if part in MODELS:
            show(part, args)
        else:
            tables.say(log.read_text()[-6000:])


def commands(part: str, args: argparse.Namespace) -> list[list[str]]:
    """Returns the command lines of a part."""
    tp, python = str(args.tp_size), sys.executable
    if part in MODELS:
        model, result = MODELS[part], result_of(part, args)
        line = [python, "-m", "jdllm.bench.one_batch", "--model-path", model.config]
        line += ["--load-format", "dummy", "--tp-size", tp, "--result-filename", str(result)]
        line += ["--batch-size", *args.batch_size]
        if model.block is not None:
            line += ["--threshold", *args.threshold]
            line += ["--dllm-algorithm-config", str(block_size_file(model.block, args))]
        line += ["--input-len", str(args.input_len), "--output-len", str(output_len(model, args))]
        line += ["--disable-tqdm", "--log-level", "info"]
        return [[*line, *model.flags, *args.flags]]
    script = {"sums": "bench_collectives", "canvas": "bench_canvas", "soak": "soak"}
    line = [python, str(SCRIPTS / f"{script.get(part, 'bench_image_parts')}.py")]
    if part == "sums":
        return [[*line, "--tp", tp, "--skews", str(args.skews)]]
    if part == "canvas":
        line += ["--model-path", "configs/llada-8b", "--batch-size", "1", "--tp-size", tp]
        return [[*line, "--tokens-per-forward", "9.91"]]
    if part == "soak":
        line += ["--minutes", str(args.soak_minutes), "--input-ids-below", "100000"]
        line += ["--log-file", str(server_log_of(part, args)), "--"]
        line += ["--model-path", MODELS["mini"].config, "--max-running-requests", "12"]
        return [[*line, "--load-format", "dummy", "--tp-size", tp, "--context-length", "2048"]]
    line += ["--tp-size", tp, "--transformer", "512x1", "512x4", "1024x1"]
    return [[*line, "--pipeline", f"configs/{name}"] for name in PIPELINES]


def run_together(parts: list[str], args: argparse.Namespace) -> None:
    """Runs the benchmarks of text models, which compile at the same time and measure in turn."""
    if len(parts) != len(args.together):
        raise SystemExit(f"--together takes a share for each of {', '.join(parts)}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = {}
        for number, (part, share) in enumerate(zip(parts, args.together, strict=True)):
            ((python, _, _, *flags),) = commands(part, args)
            script = [python, str(SCRIPTS / "one_batch_in_turn.py"), folder]
            environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": share}
            command = [*script, str(number), str(len(parts)), *flags]
            one = started(command, log_of(part, args), environment)
            running[number] = stack.enter_context(one)
        until = time.monotonic() + args.limit_s
        while running and time.monotonic() < until:
            for number, process in list(running.items()):
                code = child_process.exit_code(process)
                if code is not None:
                    tables.say(f"## {parts[number]}: ended with {code}")
                    del running[number]
                    # However it ended, the others need not wait for it.
                    for name in (one_batch_in_turn.READY, one_batch_in_turn.DONE):
                        (pathlib.Path(folder) / f"{name}-{number}").touch()
            time.sleep(1)
        for number in running:
            tables.say(f"## {parts[number]}: stopped after {args.limit_s:.0f} s")


def run(command: list[str], log: pathlib.Path, limit_s: float) -> str:
    """Runs a command whose output is added to `log`; returns how it ended."""
    with started(command, log, os.environ) as process:
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
    return "done" if code == 0 else f"FAILED with {code}"


@contextlib.contextmanager
def started(
    command: list[str], log: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a command whose output is added to `log`, and which ends with the block."""
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        with child_process.started(command, output=out, environment=environment) as process:
            yield process


def output_len(model: TextModel, args: argparse.Namespace) -> int:
    return args.output_len if model.output_len is None else model.output_len


def block_size_file(block: int, args: argparse.Namespace) -> pathlib.Path:
    """Returns a file for `--dllm-algorithm-config` that holds the block size."""
    path = args.log_dir / f"block-{block}.yaml"
    path.write_text(f"block_size: {block}\n")
    return path


def log_of(part: str, args: argparse.Namespace) -> pathlib.Path:
    return args.log_dir / f"tp{args.tp_size}-{part}.log"


def server_log_of(part: str, args: argparse.Namespace) -> pathlib.Path:
    return args.log_dir / f"tp{args.tp_size}-{part}-server.log"


def result_of(part: str, args: argparse.Namespace) -> pathlib.Path:
    return args.log_dir / f"tp{args.tp_size}-{part}.jsonl"


def show(part: str, args: argparse.Namespace) -> None:
    """Prints the rows that a part has measured."""
    result = result_of(part, args)
    rows = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    if not rows:
        tables.say(log_of(part, args).read_text()[-3000:])
        return
    floors.measured_on(rows[0]["device"])
    tables.say(f"# {rows[0]['command']}\n# {args.tp_size} x {rows[0]['device']}")
    tables.say(f"{'model':15s} threshold batch  ms/forward  floor  ratio  tokens/s  idle")
    for row in rows:
        floor = share_ms(MODELS[part], row["batch_size"], args)
        # All blocks of few forwards may arrive together.
        ms = 1e3 * (row["median_decode_latency"] or row["mean_decode_latency"] or math.nan)
        idle = row["device_idle_fraction"]
        tables.say(
            f"{part:15s} {row['threshold']!s:>9s} {row['batch_size']:5d} {ms:11.2f} {floor:6.2f} "
            f"{ms / floor:6.2f} {row['output_throughput']:9.1f}  "
            + ("n/a" if idle is None else f"{idle:.1%}")
        )


def share_ms(model: TextModel, rows: int, args: argparse.Namespace) -> float:
    """Returns the floor of a forward, if its work were spread evenly over the GPUs."""
    read: Any = loading.read_config(model.config, block_size=model.block)
    context = args.input_len + output_len(model, args) // 2
    block = read.spec.diffusion.block_size
    work = floors.forward(read, rows=rows, new_tokens=block, context=context, head=True)
    return floors.total_floor_ms(work) / args.tp_size


if __name__ == "__main__":
    main()
