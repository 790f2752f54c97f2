"""The order in which waiting requests are admitted: fair between calls, and free of starvation.

All prompts and choices of one call (one HTTP request, one call of the engine) are one *group*.
Groups take turns. A turn admits one member; then the group goes behind all other groups, and a
new group begins there, too. So while a member waits that has k others of its group before it,
every other group is admitted at most k + 1 times, whatever its size: a list of a thousand
prompts delays a later question by one admission. A single group, and groups of one member each,
are served in order of arrival.

`lpm` (longest cached prefix first) chooses inside this order. The groups that wait now make up a
sweep: each has one turn in it, the longest prefix first, and a group that comes later waits for
the next sweep. In a turn, a group's member with the longest prefix is admitted. So while a member
waits that has k others of its group beside it, another group is admitted at most 2 (k + 1) times.

Priorities divide the queue into classes. A class is served only while no better one waits, so a
class can starve; inside a class the promises above hold. Requests that were preempted come first
in their class, because a user already waits for their next tokens.

The caller may pass over a request that is not ready. It keeps its place: it is asked first again,
and of its group, too, when another member has used the group's turn. Groups of one member each are
so admitted in order of arrival, as soon as they are ready.

Choosing and moving a request takes constant time (`lpm`: a bounded number of prefix matches),
however long the queue is, beside the requests that are passed over.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

from jdllm.scheduler.request import Request

Policy = Literal["fcfs", "lpm"]
PrefixLen = Callable[[Request], int]

# Matching a prefix costs time for each candidate in each round.
MAX_MATCHED_REQUESTS = 128


class WaitingQueue:
    """The requests that wait; iteration is in order of arrival."""

    def __init__(self) -> None:
        self._classes: dict[float, _Class] = {}
        self._order: list[float] = []  # the classes that are not empty, best first
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        requests = itertools.chain.from_iterable(self._classes.values())
        return iter(sorted(requests, key=lambda request: request.arrival))

    def add(self, request: Request) -> None:
        """Puts a request in its place: a preempted one to the front of its class."""
        key = request.priority_class
        if key not in self._classes:
            self._classes[key] = _Class()
            bisect.insort(self._order, key)
        self._classes[key].add(request)
        self._len += 1

    def remove(self, request: Request, *, is_turn: bool = False) -> None:
        """Takes a request out; `is_turn`: it was admitted, which was the turn of its group."""
        key = request.priority_class
        self._classes[key].remove(request, is_turn=is_turn)
        if not self._classes[key]:
            del self._classes[key]
            self._order.remove(key)
        self._len -= 1

    def in_turn(self, policy: Policy, prefix_len: PrefixLen) -> Iterator[Request]:
        """Yields the request to admit next, then those to admit if the ones before are passed over.

        `prefix_len` gives a request's cached tokens. The queue must not change meanwhile.
        """
        for key in self._order:
            yield from self._classes[key].in_turn(policy, prefix_len)


@dataclasses.dataclass(slots=True)
class _Group:
    """The members of a call that wait, by id in order of arrival.

    `turn` numbers turns in the order in which they were queued.
    """

    turn: int
    members: collections.OrderedDict[str, Request] = dataclasses.field(
        default_factory=collections.OrderedDict
    )


class _Class:
    """The waiting requests of one priority: the preempted ones, and groups in order of turns."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []
        self._groups: collections.OrderedDict[object, _Group] = collections.OrderedDict()
        self._num_turns = 0
        self._sweep_end = 0  # turns below this number belong to the sweep of `lpm`

    def __bool__(self) -> bool:
        return bool(self._preempted or self._groups)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for group in self._groups.values():
            yield from group.members.values()

    def add(self, request: Request) -> None:
        if request.num_preemptions:
            bisect.insort(self._preempted, request, key=Request.rank)
            return
        if request.group not in self._groups:
            self._groups[request.group] = _Group(self._next_turn())
        self._groups[request.group].members[request.request_id] = request

    def remove(self, request: Request, *, is_turn: bool) -> None:
        if request.num_preemptions:
            self._preempted.remove(request)
            return
        group = self._groups[request.group]
        del group.members[request.request_id]
        if not group.members:
            del self._groups[request.group]
        elif is_turn:
            group.turn = self._next_turn()
            self._groups.move_to_end(request.group)

    def in_turn(self, policy: Policy, prefix_len: PrefixLen) -> Iterator[Request]:
        yield from self._preempted
        first: list[Request] = []
        if policy == "lpm" and self._groups:
            first = sorted(self._candidates(), key=prefix_len, reverse=True)
            yield from first
        chosen = {request.request_id for request in first}
        for group in self._groups.values():
            yield from (one for name, one in group.members.items() if name not in chosen)

    def _candidates(self) -> list[Request]:
        """Returns the first members of each group of the sweep; begins a sweep if one has ended."""
        front = list(itertools.islice(self._groups.values(), MAX_MATCHED_REQUESTS))
        groups = [group for group in front if group.turn < self._sweep_end]
        if not groups:
            groups, self._sweep_end = front, front[-1].turn + 1
        share = MAX_MATCHED_REQUESTS // len(groups)
        return [
            request
            for group in groups
            for request in itertools.islice(group.members.values(), share)
        ]

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns - 1
