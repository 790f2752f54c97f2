"""Control tokens: what a chat template may write and a stranger may not.

Clients' text is rendered with placeholders (see `templates.placeholders`), which tell the
template's own control tokens from forged ones. A second tokenizer then encodes the rendered text as
a whole. It shares its model with the first one, but knows the control tokens only by names that
nobody can guess, and the template's own get these names. So what lies between two of them is one
plain text, whatever it looks like.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import models, normalizers

from jdllm.templates import placeholders

Added = Mapping[int, tokenizers.AddedToken]

_UNKNOWN_LETTER = "\U0010fffe"


class Span(NamedTuple):
    """A control token in a text, from `start` to `end`."""

    start: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens `ids` of a tokenizer, and how text without forged ones is encoded."""

    def __init__(self, backend: tokenizers.Tokenizer, ids: Collection[int]):
        added: Added = backend.get_added_tokens_decoder()
        secret = f"\U000f0000{secrets.token_hex(16)}"
        self._names = {one: f"{secret}:{one};" for one in ids}
        self._gap = f"{secret};"
        self.texts = {one: added[one].content for one in ids}
        self._normalizer = backend.normalizer
        if self._normalizer is not None and not any(added[one].normalized for one in ids):
            self._normalizer = None  # it changes nothing that is looked for
        forms = {form for text in self.texts.values() for form in (text, self._form(text))}
        self.firsts = frozenset(form[0] for form in forms if form)
        self._scanner = _scanner(added, self._gap, self._normalizer)
        self._scanned_ids = _same_tokens(self._scanner, {one: added[one].content for one in added})
        self._plain = _plain(backend, added, self._names, self._gap)
        self._plain_ids = _same_tokens(
            self._plain, {one: self._names.get(one, added[one].content) for one in added}
        )
        (self._gap_id,) = self._plain.encode(self._gap, add_special_tokens=False).ids
        in_model = {self._plain.token_to_id(text) for text in self.texts.values()}
        unknown = self._plain.encode(_UNKNOWN_LETTER, add_special_tokens=False).ids
        self._leaks = in_model.difference(unknown, [None])

    @property
    def is_usable(self) -> bool:
        """Whether the second tokenizer numbers no added token as the model numbers its own."""
        of_model = self._plain.model.id_to_token
        added = self._plain.get_added_tokens_decoder().items()
        return all(of_model(number) in (None, token.content) for number, token in added)

    def begins(self, letter: str) -> bool:
        """Says whether a control token can begin with a character, or with its normal form."""
        return letter in self.firsts or not self.firsts.isdisjoint(self._form(letter))

    def are_forged(self, text: str, marked: str) -> bool:
        """Says whether `text` has other control tokens than the same text with placeholders."""
        found, own = self._spans(text), self._spans(marked)
        if len(text) == len(marked):
            return found != own
        return [one.token_id for one in found] != [one.token_id for one in own]

    def encode(
        self, marked: str, hidden: placeholders.Hidden | None, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Returns the ids of a rendered text, in which only its own control tokens are some."""
        ids: list[int] = []
        # If the model itself makes a control token of plain text, it must see this in pieces.
        for gap in ("", self._gap):
            text = self._named(marked, hidden, gap)
            (found,) = self._plain.encode_batch([text], add_special_tokens=add_special_tokens)
            # What the post-processor adds has the model's own ids already.
            pairs = list(zip(found.ids, found.special_tokens_mask, strict=True))
            ids = [one if is_end else self._plain_ids.get(one, one) for one, is_end in pairs
                   if one != self._gap_id]  # fmt: skip
            if hidden is None or self._leaks.isdisjoint(one for one, is_end in pairs if not is_end):
                break
        return ids

    def _named(self, marked: str, hidden: placeholders.Hidden | None, gap: str) -> str:
        """Returns what the second tokenizer takes for a rendered text."""
        restored = (lambda text, _: text) if hidden is None else hidden.restored
        parts: list[str] = []
        end = 0
        for span in self._spans(marked):
            parts += [restored(marked[end : span.start], gap), self._names[span.token_id]]
            end = span.end
        return "".join([*parts, restored(marked[end:], gap)])

    def _spans(self, text: str) -> list[Span]:
        """Returns the control tokens that the first tokenizer finds in a text."""
        (found,) = self._scanner.encode_batch([text], add_special_tokens=False)
        numbered = (
            (self._scanned_ids.get(i), at) for i, at in zip(found.ids, found.offsets, strict=True)
        )
        return [Span(*at, one) for one, at in numbered if one in self.texts]

    def _form(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(text)


def _scanner(
    added: Added, word: str, normalizer: normalizers.Normalizer | None
) -> tokenizers.Tokenizer:
    """Returns a tokenizer that finds added tokens; all text between two of them is `word`."""
    made = tokenizers.Tokenizer(models.WordLevel({word: 0}, unk_token=word))
    made.normalizer = normalizer
    made.add_tokens(
        [
            tokenizers.AddedToken(
                one.content, single_word=one.single_word, normalized=one.normalized, special=False
            )
            for one in added.values()
        ]
    )
    return made


def _plain(
    backend: tokenizers.Tokenizer, added: Added, names: Mapping[int, str], gap: str
) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the model of `backend` and with other names of some tokens."""
    made = tokenizers.Tokenizer(backend.model)
    made.normalizer = backend.normalizer
    made.pre_tokenizer = backend.pre_tokenizer
    made.post_processor = backend.post_processor
    made.add_tokens([_renamed(token, names.get(one)) for one, token in sorted(added.items())])
    made.add_tokens([tokenizers.AddedToken(gap, normalized=False, special=False)])
    return made


def _renamed(token: tokenizers.AddedToken, name: str | None) -> tokenizers.AddedToken:
    is_kept = name is None
    return tokenizers.AddedToken(
        token.content if is_kept else name,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word and is_kept,  # a name is only where the token was found
        normalized=token.normalized and is_kept,
        special=False,
    )


def _same_tokens(made: tokenizers.Tokenizer, contents: Mapping[int, str]) -> dict[int, int]:
    """Maps the ids of added tokens of `made` to the ids that have the same contents."""
    ids = {content: one for one, content in contents.items()}
    found = made.get_added_tokens_decoder().items()
    return {number: ids[token.content] for number, token in found if token.content in ids}
