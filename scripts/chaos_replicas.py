"""Kills replicas of a running server at random while clients ask it, and checks every answer.

    jdllm serve --replicas 3 --port 30000 &
    python scripts/chaos_replicas.py --url http://127.0.0.1:30000 --minutes 5

It runs on the machine of the replicas, finds their processes in /server_info, and sends SIGKILL to
one of them each `--every-s` seconds, if at least two serve. Prompts run at temperature 0, so each
has one right text. An answer must be right, or 503; a stream must be right, or a beginning of the
right text with an error event behind it. At the end every replica must be back. Exit code 1 tells
of anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

import httpx

PROMPTS = [f"Tom has {count} apples." for count in range(3, 9)]
BACK_S = 600.0  # a new replica loads and compiles


def body(prompt: str, *, stream: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, "stream": stream}


class Chaos:
    """One run: clients, kills, and the tally of what came of each request."""

    def __init__(self, client: httpx.AsyncClient, texts: dict[str, str], seed: int):
        self._client = client
        self._texts = texts
        self._random = random.Random(seed)
        self.tally: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    async def ask_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            prompt = self._random.choice(PROMPTS)
            ask = self._stream if self._random.random() < 0.5 else self._whole
            try:
                self.tally[await ask(prompt)] += 1
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.wrong.append(f"{ask.__name__}: {type(error).__name__}: {error}")

    async def _whole(self, prompt: str) -> str:
        response = await self._client.post("/generate", json=body(prompt, stream=False))
        if response.status_code == 503:
            return "whole: 503"
        assert response.status_code == 200, response.text
        assert response.json()["text"] == self._texts[prompt], "a wrong text"
        return "whole: right"

    async def _stream(self, prompt: str) -> str:
        text, error = "", None
        request = self._client.stream("POST", "/generate", json=body(prompt, stream=True))
        async with request as response:
            if response.status_code == 503:
                return "stream: 503"
            assert response.status_code == 200, response.status_code
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    error = event.get("error")
                    text = text if error else event["text"]
        if error is not None:
            assert "lost" in error["message"], error
            assert self._texts[prompt].startswith(text), "a wrong beginning"
            return "stream: ended with an error event"
        assert text == self._texts[prompt], f"a wrong text: {text!r}"
        return "stream: right"

    async def kill_until(self, end_s: float, every_s: float) -> None:
        while time.monotonic() + every_s < end_s:
            await asyncio.sleep(every_s)
            states = await replicas(self._client)
            if len(states) < 2:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(states)["pid"], signal.SIGKILL)
                self.tally["kills"] += 1


async def replicas(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return (await client.get("/server_info")).json()["internal_states"]


async def run(options: argparse.Namespace) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=300, limits=limits) as client:
        wanted = len(await replicas(client))
        texts = {}
        for prompt in PROMPTS:
            answer = await client.post("/generate", json=body(prompt, stream=False))
            texts[prompt] = answer.raise_for_status().json()["text"]
        chaos = Chaos(client, texts, options.seed)
        end_s = time.monotonic() + 60 * options.minutes
        await asyncio.gather(
            chaos.kill_until(end_s, options.every_s),
            *(chaos.ask_until(end_s) for _ in range(options.clients)),
        )
        deadline = time.monotonic() + BACK_S
        while len(await replicas(client)) < wanted and time.monotonic() < deadline:
            await asyncio.sleep(1)
        if len(await replicas(client)) < wanted:
            chaos.wrong.append(f"not all of {wanted} replicas came back in {BACK_S:.0f} s")
    for what, count in sorted(chaos.tally.items()):
        sys.stdout.write(f"{count:6d} {what}\n")
    for line in chaos.wrong:
        sys.stdout.write(f"WRONG {line}\n")
    return 1 if chaos.wrong or not chaos.tally["kills"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
