"""OpenAI's `logprobs` objects, made from the lists in SGLang's `meta_info`.

A log-probability is that of the step in which the token was written. Positions are written in any
order, so the sum over an answer is no likelihood of its text. OpenAI's objects list the tokens of
the text (see `token_texts`), SGLang's every output token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jdllm.server.edge import token_texts

if TYPE_CHECKING:
    from jdllm.engine import generations


def of_chat(
    listed: Sequence[token_texts.Listed],
    generation: generations.Generation,
    texts: token_texts.TokenTexts,
) -> dict[str, Any]:
    """Returns the object of a chat choice for some of its tokens."""
    rows = []
    for token in listed:
        logprob, best = _values(generation, token)
        top = [_entry(texts.data(other, token.is_first, False), value) for value, other, _ in best]
        rows.append(_entry(token.data, logprob) | {"top_logprobs": top})
    return {"content": rows, "refusal": None}


def of_completion(
    listed: Sequence[token_texts.Listed],
    generation: generations.Generation,
    texts: token_texts.TokenTexts,
) -> dict[str, Any]:
    """Returns the object of a text choice for some of its tokens."""
    has_top = "output_top_logprobs" in generation.meta_info
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in listed:
        text, (logprob, best) = token_texts.written(token.data), _values(generation, token)
        top = {
            token_texts.written(texts.data(other, token.is_first, False)): value
            for value, other, _ in best
        }
        row = text, logprob, top | {text: logprob} if has_top else None, token.offset
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def with_texts(reply: dict[str, Any], texts: token_texts.TokenTexts) -> dict[str, Any]:
    """Returns SGLang's object with the text in each (log-probability, token id, text)."""
    meta = dict(reply["meta_info"])
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = [
            (value, token_id, texts.alone(token_id))
            for value, token_id, _ in meta["output_token_logprobs"]
        ]
    if "output_top_logprobs" in meta:
        meta["output_top_logprobs"] = [
            [(value, token_id, texts.alone(token_id)) for value, token_id, _ in best]
            for best in meta["output_top_logprobs"]
        ]
    return reply | {"meta_info": meta}


def _values(
    generation: generations.Generation, token: token_texts.Listed
) -> tuple[float, Sequence[tuple[float, int, None]]]:
    """Returns a token's log-probability, and the most probable tokens at its place."""
    meta = generation.meta_info
    logprob = meta["output_token_logprobs"][token.place][0]
    tops = meta.get("output_top_logprobs")
    return logprob, () if tops is None else tops[token.place]


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_texts.written(data), "logprob": logprob, "bytes": list(data)}
