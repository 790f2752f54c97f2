"""Which tokens a request may write: the tokens of its bad words, and a check that some are left."""

from __future__ import annotations

from collections.abc import Sequence

from jdllm import errors
from jdllm.engine.tokenizer import Tokenizer
from jdllm.options import sampling_params
from jdllm.scheduler import request
from jdllm.spec import ModelSpec


def banned_ids(bad_words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens of the words, each with and without a space before it.

    A step writes several positions at once, so only a word that is one token can be kept out for
    certain. Raises a `RequestError` for other words.
    """
    if not bad_words:
        return ()
    if tokenizer is None:
        raise errors.RequestError("bad_words need a tokenizer", param="bad_words")
    found: dict[int, None] = {}
    for word in bad_words:
        forms = [
            tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
        ]
        single = [ids[0] for ids in forms if len(ids) == 1]
        if not single:
            raise errors.RequestError(
                f"bad_words: {word!r} has several tokens ({len(forms[0])}); positions are written "
                "in parallel, so only words of one token can be banned",
                param="bad_words",
            )
        found |= dict.fromkeys(single)
    return tuple(found)


def check(
    sampling: sampling_params.SamplingParams,
    banned: Sequence[int],
    spec: ModelSpec,
    *,
    eos_token_ids: Sequence[int],
) -> None:
    """Raises a `RequestError` if the request leaves no token that a position may get."""
    if sampling.allowed_token_ids is None:
        return  # a vocabulary has more tokens than a request can ban
    left = set(sampling.allowed_token_ids) - set(banned) - {spec.diffusion.mask_token_id}
    if sampling.min_new_tokens:
        left -= set(request.end_tokens(sampling.stop_token_ids, eos_token_ids, sampling.ignore_eos))
    if not left:
        raise errors.RequestError(
            "allowed_token_ids leaves no token to write: the mask, bad_words and, before "
            "min_new_tokens, end tokens are never written",
            param="allowed_token_ids",
        )
