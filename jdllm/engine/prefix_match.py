"""How much of a stop string stands at the end of a growing text (Knuth, Morris and Pratt).

The search takes time linear in the characters that it is fed, whatever the stop string is.
"""

from __future__ import annotations


class PrefixMatch:
    """The longest proper prefix of `pattern` that the text fed so far ends with."""

    def __init__(self, pattern: str):
        self._pattern = pattern
        # Entry i: the length of the longest border of pattern[: i + 1]. It grows with the match,
        # so a long pattern that never begins to match costs nothing.
        self._borders = [0]
        self._matched = 0

    def feed(self, text: str) -> None:
        """Appends characters to the text."""
        for character in text:
            self._matched = self._advanced(self._matched, character)
            if self._matched > len(self._borders):
                last = self._pattern[self._matched - 1]
                self._borders.append(self._advanced(self._borders[-1], last))

    def reset(self) -> None:
        """Forgets the text."""
        self._matched = 0

    @property
    def size(self) -> int:
        """The length of that prefix; it is shorter than the pattern."""
        if self._matched < len(self._pattern):
            return self._matched
        return self._borders[self._matched - 1]

    def _advanced(self, matched: int, character: str) -> int:
        """Returns how much is matched once `character` follows a match of `matched`."""
        while matched and (matched == len(self._pattern) or self._pattern[matched] != character):
            matched = self._borders[matched - 1]
        return matched + (self._pattern[matched] == character)
