"""Placeholders: private-use characters that keep what clients write apart from the template.

A control token in the text of a stranger must not become one. So each character with which a
control token can begin is replaced by a placeholder in this text, before the template is rendered.
A control token of the rendered text then begins in the template's own text or in a turn of the
assistant, whatever the template joins, cuts or strips. A placeholder is one character as well, so
the template writes the same for both.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jdllm import errors
from jdllm.templates import chat, conversations

Turns = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
# Where a pattern of a template takes a value: '<%s>' % name, '<{}>'.format(name).
_GAP = re.compile(r"%|\{")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A conversation with placeholders; `letters` maps each of them to its character."""

    messages: list[Any]
    tools: Any
    letters: Mapping[int, str]

    def restored(self, text: str, gap: str = "") -> str:
        """Returns a text with the characters that were hidden, each of them between two gaps."""
        return text.translate({place: gap + one + gap for place, one in self.letters.items()})


class Hider:
    """Hides what can begin a control token in the messages that are no turns of the assistant.

    `begins` says of a character whether a control token can begin with it. `taken` has characters
    that cannot be placeholders.
    """

    def __init__(
        self,
        template: chat.ChatTemplate,
        control_tokens: Sequence[str],
        *,
        begins: Callable[[str], bool],
        taken: str,
    ):
        self._begins = begins
        self._words = template.abilities.words
        self._openings = {one[:end] for one in control_tokens for end in range(1, len(one))}
        self._longest = max(map(len, self._openings), default=0)
        self._taken = frozenset("".join((taken, *template.literals)))
        gaps = (part for one in template.literals for part in _GAP.split(one))
        self._template_opens = any(map(self._is_open, gaps))

    def hidden(
        self,
        messages: Turns,
        tools: Tools | None,
        variables: Mapping[str, Any] | None,
        *,
        continues_final: bool = False,
    ) -> Hidden | None:
        """Returns the conversation with placeholders; None if it needs none.

        With `continues_final` the final message is one that the model writes.
        """
        last = len(messages) - 1 if continues_final else len(messages)
        is_written = [one["role"] != "assistant" and i < last for i, one in enumerate(messages)]
        written = [_content(one) for one, is_it in zip(messages, is_written, strict=True) if is_it]
        others = [one for one, is_it in zip(messages, is_written, strict=True) if not is_it]
        letters = self._letters([written, tools], others)
        if not letters:
            return None
        table = self._table(letters, [messages, tools, variables])
        return Hidden(
            messages=[
                self._hidden_message(one, table) if is_it else one
                for one, is_it in zip(messages, is_written, strict=True)
            ],
            tools=self._translated(tools, table),
            letters={ord(place): chr(letter) for letter, place in table.items()},
        )

    def _letters(self, written: Any, others: Any) -> set[str]:
        found: set[str] = set()
        opens = self._template_opens or any(self._is_open(s.rstrip()) for s in _strings(others))
        for text in _strings(written):
            found.update(filter(self._begins, set(text)))
            if opens:  # the rest of a token that begins in front of this text
                found.update(text.lstrip()[:1])
        return found

    def _is_open(self, text: str) -> bool:
        """Says whether a text ends where a control token has begun."""
        ends = range(1, min(len(text), self._longest) + 1)
        return any(text[-size:] in self._openings for size in ends)

    def _table(self, letters: set[str], values: Any) -> dict[int, str]:
        taken = self._taken.union(*_strings(values))
        every = map(chr, itertools.chain(*_PRIVATE_USE))
        free = (one for one in every if one not in taken)
        table = dict(zip(map(ord, sorted(letters)), free, strict=False))
        if len(table) < len(letters):
            raise errors.RequestError(
                "the messages hold nearly all private-use characters; leave some out",
                param="messages",
            )
        return table

    def _hidden_message(
        self, message: Mapping[str, Any], table: Mapping[int, str]
    ) -> dict[str, Any]:
        content = _content(message).items()
        return {**message, **{name: self._translated(value, table) for name, value in content}}

    def _translated(self, value: Any, table: Mapping[int, str]) -> Any:
        """Returns a copy of a value of JSON with other characters; names that are read stay."""
        if isinstance(value, str):
            return value.translate(table)
        if isinstance(value, Mapping):
            return {
                name if self._is_read(name) else self._translated(name, table): self._translated(
                    entry, table
                )
                for name, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._translated(entry, table) for entry in value]
        return value

    def _is_read(self, name: Any) -> bool:
        """Says whether the template may look for a name; a control token is no such name."""
        return name in self._words and not any(map(self._begins, name))


def samples(template: chat.ChatTemplate, text: str) -> Iterator[list[dict[str, Any]]]:
    """Yields conversations in which users, systems and tools write `text`, if they are taken."""
    user, system = {"role": "user", "content": text}, {"role": "system", "content": text}
    named, answer = {**user, "name": text}, {"role": "assistant", "content": "Yes."}
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": text, "tool_call_id": "call00001", "name": "f"}
    for messages in ([user], [system, user], [user, answer, user], [named], [user, calls, result]):
        turns = conversations.for_template(messages, template.abilities)
        try:
            template.render(turns)
        except errors.RequestError:
            continue
        yield turns


def is_transparent(template: chat.ChatTemplate, hider: Hider, letters: Iterable[str]) -> bool:
    """Says whether the template writes placeholders of `letters` as it writes characters."""
    text = "".join((_PRINTABLE, *(f"a{letter}" for letter in letters), "z"))
    for turns in samples(template, text):
        hidden = hider.hidden(turns, None, None)
        if hidden is None:
            continue
        try:
            rendered = template.render(hidden.messages)
        except errors.RequestError:
            return False
        if hidden.restored(rendered) != template.render(turns):
            return False
    return True


def _content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "role"}


def _strings(value: Any) -> Iterator[str]:
    """Yields the texts in a value of JSON, nested to any depth."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
