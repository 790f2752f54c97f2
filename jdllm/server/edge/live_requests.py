"""Which requests run for whom, so that a client can abort its own requests and no others.

Names are exact. SGLang (0.5.23) ends every request whose id *begins* with the given one: a client
that names a request `c` and aborts it ends all the `chatcmpl-…` of others. Here a name stands for
one request, for all prompts of a list (which run as `name-0`, `name-1`, …) or for all choices of
a prompt, and only for those that the same API key began.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING

from jdllm.engine import requests
from jdllm.server.edge import request_context

if TYPE_CHECKING:
    from jdllm.engine import generations


class LiveRequest:
    """The prompts of one HTTP request: `counts` are their numbers of choices."""

    def __init__(self, request_ids: Sequence[str], counts: Sequence[int], owner: str):
        self.owner = owner
        self._counts = dict(zip(request_ids, counts, strict=True))
        self._ended: set[str] = set()
        names: list[str] = list(request_ids)
        group = group_id(request_ids)
        if group is not None:
            names.append(group)
        self.names = frozenset(names)

    def end(self, choice_id: str) -> None:
        """Notes that a choice has ended; its id may be another request's from now on."""
        self._ended.add(choice_id)

    def choices(self, name: str | None = None) -> set[str]:
        """Returns the ids of the unfinished choices of a prompt, or of all prompts."""
        prompts = [name] if name in self._counts else self._counts
        ids = {
            requests.choice_id(prompt, self._counts[prompt], index)
            for prompt in prompts
            for index in range(self._counts[prompt])
        }
        return ids - self._ended


class LiveRequests:
    """The requests of one server that have not been answered yet, by their names."""

    def __init__(self) -> None:
        # Different clients may choose the same name.
        self._by_name: dict[str, set[LiveRequest]] = {}

    @contextlib.contextmanager
    def hold(self, request_ids: Sequence[str], counts: Sequence[int]) -> Iterator[LiveRequest]:
        """Makes a request of the current caller known for as long as the context lasts."""
        live = LiveRequest(request_ids, counts, request_context.CALLER.get().name)
        for name in live.names:
            self._by_name.setdefault(name, set()).add(live)
        try:
            yield live
        finally:
            for name in live.names:
                self._by_name[name].discard(live)
                if not self._by_name[name]:
                    del self._by_name[name]

    async def watch(
        self,
        events: AsyncGenerator[generations.Generation, None],
        request_ids: Sequence[str],
        counts: Sequence[int],
    ) -> AsyncGenerator[generations.Generation, None]:
        """Passes the events of a request on; it is known while they come."""
        with self.hold(request_ids, counts) as live:
            async with contextlib.aclosing(events):
                async for generation in events:
                    if generation.finish_reason is not None:
                        live.end(generation.request_id)
                    yield generation

    def named(self, name: str, caller: request_context.Caller) -> set[str]:
        """Returns the ids of the choices that `name` stands for, of those the caller began."""
        found: set[str] = set()
        for live in self._of(name, caller):
            found |= live.choices(name)
        prompt, _, _ = name.rpartition("-")  # `name` may be a choice
        for live in self._of(prompt, caller):
            found |= live.choices(prompt) & {name}
        return found

    def all_of(self, caller: request_context.Caller) -> set[str]:
        """Returns the ids of all choices that the caller began."""
        lives = {live for name in self._by_name for live in self._of(name, caller)}
        return {choice for live in lives for choice in live.choices()}

    def _of(self, name: str, caller: request_context.Caller) -> list[LiveRequest]:
        lives = self._by_name.get(name, ())
        return [live for live in lives if caller.is_admin or live.owner == caller.name]


def group_id(request_ids: Sequence[str]) -> str | None:
    """Returns the name that the prompts of a list share, None if they have names of their own."""
    group = request_ids[0].removesuffix("-0")
    is_group = len(request_ids) > 1 and all(
        one == f"{group}-{index}" for index, one in enumerate(request_ids)
    )
    return group if is_group else None
