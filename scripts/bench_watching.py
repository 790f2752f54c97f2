"""Throughput of a server with and without a client that watches its answer being denoised.

    python scripts/bench_watching.py -- --model-path configs/llada2.0-mini --load-format dummy
    python scripts/bench_watching.py --batch-size 4 --input-len 64 --output-len 64

Starts a server (its flags come after `--`; the bundled model by default) and sends batches of
streaming completions that all arrive at once. In a "watched" batch one of them asks for the frames
of `"dllm": {"stream_mode": "denoise"}`, in a "plain" one none does; they alternate. That one stream
is always read and parsed by a process of its own; the other answers are only read while they come.
With random weights the threshold 0.95 means one token a forward, 0 a whole block.

A model folder without a tokenizer (`--load-format dummy`) gets one that has a text of a space and
four letters for each id: frames carry texts. The prefix cache is emptied before each batch.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import pathlib
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import started_server
import tokenizers
from tokenizers import decoders, models

from jdllm.bench import tables
from jdllm.client import api, sse

ROUTE = api.ROUTES["completions"]
FRAME = "jdllm.denoise"
LEAD_S = 0.5  # both processes have their requests by then, and send them at the same time
PROMPT_IDS = range(100, 1000)  # ids that every vocabulary has
CONTEXT_MULTIPLE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A stream as its reader saw it; times are those of `time.monotonic`."""

    tokens: int
    end_s: float
    size: int  # bytes, from the first event to the last
    frames_at_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Figures of one batch."""

    tokens_per_s: float
    seconds: float
    frames: int
    frames_per_s: float  # from the begin of the batch to its end
    longest_gap_s: float  # between two arrivals of frames
    megabytes: float  # of the stream that may be watched


def main() -> None:
    """Parses the command line, measures, prints a line for each batch and the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.95, 0.0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--start-limit-s", type=float, default=900.0)
    parser.add_argument("--log-file", default="bench-watching-server.log", help="of the server")
    parser.add_argument("flags", nargs="*", help="flags of jdllm.serve, after --")
    args = parser.parse_args()
    if args.batch_size < 2:
        parser.error("--batch-size must be at least 2: one is watched, others are not")
    longest = args.input_len + args.output_len
    flags = ["--max-running-requests", str(args.batch_size), "--log-level", "warning"]
    flags += ["--context-length", str(-(-longest // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE)]
    with (
        with_tokenizer(args.flags) as given,
        concurrent.futures.ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")
        ) as reader,  # waits for what it reads, so the server ends before it
        started_server.started(
            [*flags, *given], log_file=args.log_file, limit_s=args.start_limit_s
        ) as server,
    ):
        tables.say(f"# {' '.join(sys.argv)}\n# {server.model}, ready after {server.start_s:.0f} s")
        for threshold in args.threshold:
            measure(server, reader, args, threshold)


def measure(
    server: started_server.Server,
    reader: concurrent.futures.Executor,
    args: argparse.Namespace,
    threshold: float,
) -> None:
    """Alternates plain and watched batches, prints each and the medians."""
    tables.say(f"\nthreshold {threshold:g}, {args.batch_size} requests of {args.output_len} tokens")
    tables.say("batch    tokens/s  seconds  frames  frames/s  longest gap, ms      MB")
    found: dict[bool, list[Batch]] = {False: [], True: []}
    for repeat in range(args.repeats + 1):
        for is_watched, batches in found.items():
            bodies = bodies_of(server.model, args, threshold)
            if is_watched:
                bodies[0]["dllm"]["stream_mode"] = "denoise"
            server.client.text("POST", "/flush_cache?timeout=30")
            one = send(server.client.base_url, reader, bodies, args.output_len)
            if repeat > 0:  # the first of each warms up
                batches.append(one)
                tables.say(line("watched" if is_watched else "plain", one))
    medians = [median(batches) for batches in found.values()]
    for name, one in zip(("plain", "watched"), medians, strict=True):
        tables.say(line(name, one) + "  (medians)")
    ratio = medians[1].tokens_per_s / medians[0].tokens_per_s
    tables.say(f"watched / plain: {ratio:.4f} of the output tokens per second")


def bodies_of(model: str, args: argparse.Namespace, threshold: float) -> list[dict[str, Any]]:
    """Returns the bodies of a batch, which are the same each time."""
    rng = random.Random(0)
    return [
        api.body(
            "completions",
            rng.choices(PROMPT_IDS, k=args.input_len),
            {"temperature": 0.0, "ignore_eos": True, "dllm": {"threshold": threshold}},
            model=model,
            max_tokens=args.output_len,
            stream=True,
        )
        for _ in range(args.batch_size)
    ]


def send(
    url: str,
    reader: concurrent.futures.Executor,
    bodies: Sequence[dict[str, Any]],
    output_len: int,
) -> Batch:
    """Sends a batch at once, its first body from the process of `reader`."""
    begin_s = time.monotonic() + LEAD_S
    first = reader.submit(read_one, url, bodies[0], begin_s)
    others = asyncio.run(read_others(url, bodies[1:], begin_s))
    one = first.result()
    counts = [seen.tokens for seen in (one, *others)]
    if set(counts) != {output_len}:
        raise SystemExit(f"answers have {counts} tokens, not {output_len} each")
    seconds = max(seen.end_s for seen in (one, *others)) - begin_s
    at_s = one.frames_at_s
    gaps = [after - before for before, after in zip(at_s, at_s[1:], strict=False)]
    return Batch(
        tokens_per_s=sum(counts) / seconds,
        seconds=seconds,
        frames=len(at_s),
        frames_per_s=len(at_s) / seconds,
        longest_gap_s=max(gaps, default=0.0),
        megabytes=one.size / 1e6,
    )


def read_one(url: str, body: dict[str, Any], begin_s: float) -> Seen:
    """Sends one request at `begin_s`; parses its events as they come."""
    answer, frames_at_s, size = api.Answer("completions"), [], 0
    with httpx.Client(base_url=url, timeout=None) as client:
        time.sleep(max(0.0, begin_s - time.monotonic()))

        def chunks(reply: httpx.Response) -> Iterator[tuple[float, bytes]]:
            nonlocal size
            for chunk in reply.iter_raw():
                size += len(chunk)
                yield time.monotonic(), chunk

        with client.stream("POST", ROUTE, json=body) as reply:
            for at_s, content in sse.payloads(chunks(reply)):
                if content != sse.DONE:
                    event = json.loads(content)
                    if event.get("object") == FRAME:
                        frames_at_s.append(at_s)
                    else:
                        answer.add(event)
    return Seen(
        tokens=answer.tokens, end_s=time.monotonic(), size=size, frames_at_s=tuple(frames_at_s)
    )


async def read_others(url: str, bodies: Sequence[dict[str, Any]], begin_s: float) -> list[Seen]:
    """Sends requests at `begin_s`; keeps what comes, and parses it after the last has ended."""
    limits = httpx.Limits(max_connections=None)

    async def read(body: dict[str, Any]) -> tuple[float, bytes]:
        async with client.stream("POST", ROUTE, json=body) as reply:
            content = b"".join([chunk async for chunk in reply.aiter_raw()])
            return time.monotonic(), content

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
        replies = await asyncio.gather(*map(read, bodies))
    return [parsed(end_s, content) for end_s, content in replies]


def parsed(end_s: float, content: bytes) -> Seen:
    answer = api.Answer("completions")
    for _, event in sse.payloads([(end_s, content)]):
        if event != sse.DONE:
            answer.add(json.loads(event))
    return Seen(tokens=answer.tokens, end_s=end_s, size=len(content))


def median(batches: Sequence[Batch]) -> Batch:
    """Returns the median of each figure."""
    rows = [dataclasses.astuple(batch) for batch in batches]
    names = [field.name for field in dataclasses.fields(Batch)]
    return Batch(**dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True)))


def line(name: str, one: Batch) -> str:
    return (
        f"{name:7s} {one.tokens_per_s:9.1f} {one.seconds:8.3f} {one.frames:7g} "
        f"{one.frames_per_s:9.1f} {1e3 * one.longest_gap_s:16.1f} {one.megabytes:7.3f}"
    )


@contextlib.contextmanager
def with_tokenizer(flags: Sequence[str]) -> Iterator[list[str]]:
    """Yields the server's flags, with a tokenizer for random weights of a folder without one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", type=pathlib.Path)
    parser.add_argument("--load-format")
    parser.add_argument("--tokenizer-path")
    known, _ = parser.parse_known_args(flags)
    model: pathlib.Path | None = known.model_path
    has_own = known.load_format != "dummy" or known.tokenizer_path
    if has_own or model is None or (model / "tokenizer_config.json").exists():
        yield list(flags)
        return
    config = json.loads((model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(pathlib.Path(folder), config.get("text_config", config)["vocab_size"])
        yield [*flags, "--tokenizer-path", folder]


def write_tokenizer(folder: pathlib.Path, size: int) -> None:
    """Writes a tokenizer of `size` entries, each a space and four letters."""
    letters = string.ascii_lowercase

    def word(number: int) -> str:
        return "Ġ" + "".join(letters[number // 26**place % 26] for place in range(4))

    vocabulary = {word(number): number for number in range(size)}
    if len(vocabulary) < size:
        raise SystemExit(f"a vocabulary of {size} has more words than four letters make")
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=word(0)))
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": word(0)}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
