"""OpenAI's `logprobs` objects, made from the lists in SGLang's `meta_info`.

A log-probability is that of the step in which the token was written. Positions are written in any
order, so the sum over an answer is no likelihood of its text.
"""

from __future__ import annotations

import codecs
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdllm.engine import generations, tokenizer

CACHED_TOKENS = 1 << 15


class TokenTexts:
    """The texts of single tokens; a part of a character is written like `bytes:\\xe2\\x80`."""

    def __init__(self, tokenizer: tokenizer.Tokenizer):
        self._tokenizer = tokenizer
        self.of = functools.lru_cache(CACHED_TOKENS)(self._of)

    def _of(self, token_id: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def of_chat(generation: generations.Generation, first: int, texts: TokenTexts) -> dict[str, Any]:
    """Returns the object of a chat choice, for the output tokens from number `first` on."""
    rows = []
    for logprob, token_id, best in _rows(generation, first):
        top = [_entry(texts, other, value) for value, other, _ in best]
        rows.append(_entry(texts, token_id, logprob) | {"top_logprobs": top})
    return {"content": rows, "refusal": None}


def of_completion(
    generation: generations.Generation, first: int, texts: TokenTexts
) -> dict[str, Any]:
    """Returns the object of a text choice, for the output tokens from number `first` on.

    `text_offset` counts the characters of the output before the token.
    """
    rows = list(_rows(generation, first))
    has_top = "output_top_logprobs" in generation.meta_info
    return {
        "tokens": [texts.of(token_id)[0] for _, token_id, _ in rows],
        "token_logprobs": [logprob for logprob, _, _ in rows],
        "top_logprobs": [
            {texts.of(other)[0]: value for value, other in
             [*((value, other) for value, other, _ in best), (logprob, token_id)]}
            if has_top else None
            for logprob, token_id, best in rows
        ],
        "text_offset": _offsets(generation, texts)[first:],
    }  # fmt: skip


def with_texts(reply: dict[str, Any], texts: TokenTexts) -> dict[str, Any]:
    """Returns SGLang's object with the text in each (log-probability, token id, text)."""
    meta = dict(reply["meta_info"])
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = [
            (value, token_id, texts.of(token_id)[0])
            for value, token_id, _ in meta["output_token_logprobs"]
        ]
    if "output_top_logprobs" in meta:
        meta["output_top_logprobs"] = [
            [(value, token_id, texts.of(token_id)[0]) for value, token_id, _ in best]
            for best in meta["output_top_logprobs"]
        ]
    return reply | {"meta_info": meta}


def _rows(generation: generations.Generation, first: int) -> Any:
    meta = generation.meta_info
    chosen = meta["output_token_logprobs"][first:]
    tops = meta.get("output_top_logprobs", [()] * (first + len(chosen)))[first:]
    return (
        (value, token_id, best) for (value, token_id, _), best in zip(chosen, tops, strict=True)
    )


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def _offsets(generation: generations.Generation, texts: TokenTexts) -> list[int]:
    """Returns where each token begins; one inside a character begins where the character does."""
    decoder, offsets, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token_id in generation.output_ids:
        offsets.append(min(length, len(generation.text)))
        length += len(decoder.decode(texts.of(token_id)[1]))
    return offsets
