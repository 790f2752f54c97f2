"""Replicas in this process: fake engines behind the messages, which tests can kill."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator, Sequence

from support import fake_engine

from jdllm.replicas import engine_host, messages, replicated_engine


class FakeReplicas:
    """Obeys `messages.Replicas`. What crosses the border is pickled, as between processes.

    `kill` makes every call of a replica raise `Lost`, also those that wait; its name stays in the
    list until `bury`, since a platform takes a while to see it.
    """

    def __init__(self, **engines: fake_engine.FakeEngine):
        self.engines = engines
        self.calls: list[tuple[str, str]] = []  # (replica, first request id)
        self._hosts = {
            name: engine_host.EngineHost(engine)  # pyright: ignore[reportArgumentType]
            for name, engine in engines.items()
        }
        self._dead = {name: asyncio.Event() for name in engines}

    def kill(self, name: str) -> None:
        self._dead[name].set()

    def bury(self, name: str) -> None:
        del self._hosts[name]

    def names(self) -> Sequence[str]:
        return list(self._hosts)

    async def stream(self, name: str, call: messages.Call) -> AsyncGenerator[messages.Item, None]:
        self.calls.append((name, call.request_ids[0]))
        async with contextlib.aclosing(self._hosts[name].stream(copied(call))) as items:
            while True:
                item = await self._unless_dead(name, anext(items, None))
                if item is None:
                    return
                yield copied(item)

    async def facts(self) -> messages.Facts:
        return copied(next(iter(self._hosts.values())).facts())

    async def report(self, name: str) -> messages.Report:
        if self._dead[name].is_set():
            raise messages.Lost("killed")
        return copied(self._hosts[name].report())

    async def abort(self, name: str, request_ids: Sequence[str], *, abort_all: bool) -> int:
        return await self._unless_dead(
            name, self._hosts[name].abort(request_ids, abort_all=abort_all)
        )

    async def flush_cache(self, name: str) -> bool:
        return await self._unless_dead(name, self._hosts[name].flush_cache())

    async def _unless_dead(self, name: str, work):
        task = asyncio.ensure_future(work)
        dead = asyncio.ensure_future(self._dead[name].wait())
        try:
            await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not dead.done():
                return task.result()
            raise messages.Lost("killed")
        finally:
            dead.cancel()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


def copied(thing):
    return pickle.loads(pickle.dumps(thing))


async def connect(replicas: FakeReplicas, **options) -> replicated_engine.ReplicatedEngine:
    """Returns the engine in front of replicas, each of which has reported once."""
    engine = replicated_engine.ReplicatedEngine(
        replicas, await replicas.facts(), tokenizer=fake_engine.FakeTokenizer(), **options
    )
    await engine.poll()
    return engine
