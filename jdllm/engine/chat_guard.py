"""Keeps the text of clients from forging turns: their control tokens stay plain text in a prompt.

Text that forges nothing is none of its business: such a prompt has the ids that it always had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from jdllm.engine import control_tokens
from jdllm.templates import chat, placeholders

Render = Callable[..., str]  # of the messages, and of tools=


class ChatGuard:
    """Guards the conversations of one tokenizer and one template.

    `special_tokens` are the texts that the tokenizer's configuration names as special ones.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: chat.ChatTemplate,
        special_tokens: Sequence[str],
    ):
        added = backend.get_added_tokens_decoder()
        shown = [template.render(turns) for turns in placeholders.samples(template, "")]
        texts = [*special_tokens, *template.literals, *shown]
        control = [
            token_id
            for token_id, token in added.items()
            # A tokenizer may have added runs of blanks, which are part of any text.
            if token.content.strip()
            and (token.special or any(token.content in one for one in texts))
        ]
        self._template = template
        self._control = control_tokens.ControlTokens(backend, control)
        contents = [token.content for token in added.values()]
        self._hider = placeholders.Hider(
            template,
            list(self._control.texts.values()),
            begins=self._control.begins,
            taken="".join([*contents, *texts]),
        )

    def works(self, encode: Callable[[str], list[int]]) -> bool:
        """Says whether the template writes placeholders as text, and harmless text has its ids."""
        return (
            self._control.is_usable
            and placeholders.is_transparent(self._template, self._hider, self._control.firsts)
            and all(
                self._control.encode(text, None) == encode(text)
                for turns in placeholders.samples(self._template, "Is 1 < 2? ")
                for text in [self._template.render(turns)]
            )
        )

    def safe_ids(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        render: Render,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        continues_final: bool,
        add_special_tokens: bool,
    ) -> list[int] | None:
        """Returns the ids of a conversation without what clients forged; None if that is nothing.

        `text` is what `render` makes of the messages as they are.
        """
        hidden = self._hider.hidden(messages, tools, variables, continues_final=continues_final)
        if hidden is None:
            return None
        marked = render(hidden.messages, tools=hidden.tools)
        if not self._control.are_forged(text, marked):
            return None
        return self._control.encode(marked, hidden, add_special_tokens=add_special_tokens)
