"""Soaks a server: random load, aborts and disconnects for minutes; then nothing may be left.

    python scripts/soak.py --minutes 30

It starts `python -m jdllm.serve` with the bundled model (further flags come after `--`; a model
without a tokenizer needs --input-ids-below N: prompts are then random token ids below N), sends
random requests from several threads, and ends some early (the client disconnects, or
/abort_request). It samples the server's resident memory and prints one line a minute. At the end it
waits until the server is idle. It fails if a request hangs or gets an error, if pages stay in use,
or if memory grew by more than `--growth-mb` between the first and the last quarter.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import re
import sys
import threading
import time
from typing import Any

import httpx
import started_server

WORDS = (
    *("Tom", "Ann", "has", "buys", "sells", "apples", "pears", "3", "7", "12"),
    *("more", "than", "how", "many", "does", "he", "have", "now"),
)
TIMEOUT_S = 300.0
GAUGES = ("num_running_reqs", "num_queue_reqs", "num_used_tokens")


def one_request(client: httpx.Client, rng: random.Random, name: str, ids_below: int | None) -> str:
    """Sends one random request; returns how it ended: "done", "left" or "aborted"."""
    length = rng.randint(1, 200)
    if ids_below is None:
        prompt: dict[str, Any] = {"text": " ".join(rng.choices(WORDS, k=length))}
    else:
        prompt = {"input_ids": rng.choices(range(ids_below), k=length)}
    body = {
        **prompt,
        "rid": name,
        "sampling_params": {
            "max_new_tokens": rng.choice([1, 16, 64, 256, 600]),
            "ignore_eos": rng.random() < 0.7,
            "temperature": rng.choice([0.0, 0.0, 1.0]),
            "dllm": {"threshold": rng.choice([0.5, 0.95, 1.0])},
        },
        "stream": True,
    }
    end = rng.choices(["done", "left", "aborted"], weights=[8, 1, 1])[0]
    began, last, is_aborted = time.monotonic(), "", False
    with client.stream("POST", "/generate", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():  # a stuck request also sends keep-alive lines
            if time.monotonic() > began + TIMEOUT_S:
                raise RuntimeError(f"{name}: not answered in {TIMEOUT_S} s")
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if end == "left":
                return end
            if last != "[DONE]":
                check(name, json.loads(last), may_abort=is_aborted)
            if end == "aborted" and not is_aborted:
                client.post("/abort_request", json={"rid": name}).raise_for_status()
                is_aborted = True
    if last != "[DONE]":
        raise RuntimeError(f"{name}: the answer ends with {last[:200]!r}")
    return end


def check(name: str, event: dict[str, Any], *, may_abort: bool) -> None:
    """Raises RuntimeError for an event that reports a fault."""
    if "error" in event:
        raise RuntimeError(f"{name}: {event['error']}")
    finish = event["meta_info"]["finish_reason"]
    if finish is not None and finish["type"] == "abort" and not may_abort:
        raise RuntimeError(f"{name}: {finish}")


def soak(
    url: str, threads: int, until: float, seed: int, ids_below: int | None
) -> tuple[collections.Counter, list[str]]:
    """Returns (the number of requests for each way to end, the errors)."""
    ends: collections.Counter = collections.Counter()
    wrong: list[str] = []

    def work(number: int) -> None:
        rng, count = random.Random(seed * 1000 + number), 0
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            while time.monotonic() < until:
                count += 1
                try:
                    name = f"soak-{number}-{count}"
                    ends[one_request(client, rng, name, ids_below)] += 1
                except (httpx.HTTPError, RuntimeError) as error:
                    wrong.append(f"{type(error).__name__}: {error}")
                if rng.random() < 0.05:
                    time.sleep(rng.uniform(0, 2))  # so that the server is idle at times

    # Daemons: where the script is ended early, nothing waits for them.
    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return ends, wrong


def resident_mb(process_id: int) -> float:
    """Returns the resident memory of a process (Linux)."""
    status = pathlib.Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None, status
    return int(found[1]) / 1024


def gauges(url: str) -> dict[str, int]:
    """Returns the server's numbers of running and queued requests and of used tokens."""
    (state,) = httpx.get(f"{url}/server_info", timeout=30).json()["internal_states"]
    return {name: state[name] for name in GAUGES}


def main() -> None:
    """Parses the command line, soaks, prints; exits with 1 if something is left or memory grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth-mb", type=float, default=50.0)
    parser.add_argument("--input-ids-below", type=int, help="of a server without a tokenizer")
    parser.add_argument("--start-limit-s", type=float, default=900.0)
    parser.add_argument("--log-file", default="soak-server.log", help="of the server")
    parser.add_argument("flags", nargs="*", help="flags of jdllm.serve, after --")
    args = parser.parse_args()
    flags = ["--log-level", "warning", *args.flags]
    if args.input_ids_below is not None:
        flags.append("--skip-tokenizer-init")
    with started_server.started(
        flags, log_file=args.log_file, limit_s=args.start_limit_s
    ) as server:
        is_well = watched_soak(server, args)
    sys.exit(0 if is_well else 1)


def watched_soak(server: started_server.Server, args: argparse.Namespace) -> bool:
    """Soaks a server and samples its memory; returns whether all is well: answers, rest, memory."""
    url, out = server.client.base_url, sys.stdout.write
    began = time.monotonic()
    until = began + 60 * args.minutes
    memory: list[float] = []

    def watch() -> None:
        while time.monotonic() < until:
            memory.append(resident_mb(server.process_id))
            minutes, seconds = divmod(round(time.monotonic() - began), 60)
            if seconds == 0:
                out(f"{minutes:3d} min  {memory[-1]:8.1f} MB  {gauges(url)}\n")
                sys.stdout.flush()
            time.sleep(1.0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    ends, wrong = soak(url, args.threads, until, args.seed, args.input_ids_below)
    watcher.join()
    deadline = time.monotonic() + 60
    while any(gauges(url).values()) and time.monotonic() < deadline:
        time.sleep(0.5)
    left = gauges(url)
    memory = memory[min(60, len(memory) // 2) :]  # the first minute warms up
    quarter = max(1, len(memory) // 4)
    grew = max(memory[-quarter:]) - max(memory[:quarter])
    out(f"requests {dict(ends)}, wrong {len(wrong)} {wrong[:3]}, left {left}, ")
    out(f"memory grew by {grew:.1f} MB\n")
    return not (wrong or any(left.values()) or grew > args.growth_mb)


if __name__ == "__main__":
    main()
