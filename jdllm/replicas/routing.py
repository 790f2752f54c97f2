"""Which replica runs a request: the one that has its prefix, unless that one is too busy.

The ingress sees every request, so loads are exact: the choices that each replica holds now.
Prefixes are known by chained hashes of the first pages of prompts, which a replica that has served
a prompt probably still has in its prefix cache. The memory of hashes is bounded; the longest unused
goes first. A wrong guess costs a prefill, never a wrong answer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

# Of each prompt; later pages follow the first ones.
HASHED_PAGES = 64
REMEMBERED_HASHES = 100_000


@dataclasses.dataclass(eq=False, slots=True)
class _Home:
    """A replica as the home of prefixes, until it is forgotten."""

    name: str


class Router:
    """Chooses replicas by name; for one thread.

    `page` is the number of tokens of a hash, 0 if replicas share no prefixes. The replica with the
    longest known prefix is chosen while its load exceeds the least one by at most `margin` choices.
    """

    def __init__(self, *, page: int, margin: int, remembered: int = REMEMBERED_HASHES):
        self._page = page
        self._margin = margin
        self._remembered = remembered
        self._loads: collections.Counter[str] = collections.Counter()
        self._turns: dict[str, int] = {}  # when a replica was chosen last
        self._turn = 0
        self._known: dict[str, _Home] = {}
        # By hash. Those that are no longer known count as none, and leave as the longest unused do.
        self._homes: collections.OrderedDict[int, _Home] = collections.OrderedDict()

    def load(self, name: str) -> int:
        """Returns how many choices a replica holds now."""
        return self._loads[name]

    def choose(self, prompt_ids: Sequence[int], names: Collection[str]) -> str | None:
        """Returns one of `names` for a prompt, None if there are none."""
        if not names:
            return None
        # Among equals the one that has waited longest, so that they take turns.
        least = min(names, key=lambda name: (self._loads[name], self._turns.get(name, 0)))
        hashes = self._hashes(prompt_ids)
        home = next(filter(None, map(self._home, reversed(hashes))), None)
        chosen = least
        if home is not None and home in names:
            is_near = self._loads[home] <= self._loads[least] + self._margin
            chosen = home if is_near else least
        self._turn += 1
        self._turns[chosen] = self._turn
        here = self._known.setdefault(chosen, _Home(chosen))
        for one in hashes:
            self._homes[one] = here
            self._homes.move_to_end(one)
        while len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return chosen

    @contextlib.contextmanager
    def hold(self, name: str, num_choices: int) -> Iterator[None]:
        """Counts choices as load of a replica for as long as the context lasts."""
        self._loads[name] += num_choices
        try:
            yield
        finally:
            self._loads[name] -= num_choices

    def forget(self, name: str) -> None:
        """Drops what is known of a replica that is gone; each of its requests may say so."""
        self._turns.pop(name, None)
        self._known.pop(name, None)

    def _home(self, one: int) -> str | None:
        """Returns the replica that has the prefix of a hash, None if that is not known."""
        home = self._homes.get(one)
        return home.name if home is not None and self._known.get(home.name) is home else None

    def _hashes(self, prompt_ids: Sequence[int]) -> list[int]:
        """Returns a hash for each of the first whole pages, of all tokens up to its end."""
        if not self._page:
            return []
        pages = min(len(prompt_ids) // self._page, HASHED_PAGES)
        found, last = [], 0
        for page in range(pages):
            last = hash((last, *prompt_ids[page * self._page : (page + 1) * self._page]))
            found.append(last)
        return found
