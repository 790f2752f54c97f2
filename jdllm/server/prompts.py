"""The prompts of a request: their fields, their limits, and their token ids.

Limits come first. What then takes time (tokenising, checking ids) is done in slices, and off the
event loop if there is much of it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jdllm import errors
from jdllm.host import offload
from jdllm.server import state
from jdllm.server.edge import bodies, field_at_fault

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Prompt = str | list[int]  # text or token ids

# No text with more characters fits into the context; tokens of spaces or signs may be this long.
MAX_CHARACTERS_PER_TOKEN = 256
MAX_CHARACTERS = 1 << 21  # on all routes
# What a prompt costs apart from its length, in characters.
SIZE_OF_A_PROMPT = 50


def split(prompt: Any) -> list[Prompt]:
    """Returns the prompts of a `prompt` field, which is str, [str], [int] or [[int]]."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and set(map(type, prompt)) == {str}:
        return prompt
    ids = bodies.token_ids(prompt)
    rows = bodies.rows_of_ids(prompt) if ids is None else [ids]
    if rows is not None:
        return list(rows)
    raise errors.RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of those, "
        "and not empty",
        param="prompt",
    )


async def all_ids(
    server: state.ServerState,
    prompts: Sequence[Prompt],
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Returns the checked token ids of each prompt; `param` names their field in errors.

    It stops at the first prompt that is too long for the context. Special tokens are added to
    texts only.
    """

    def made(prompt: Prompt) -> list[int]:
        found = _encoded(server, prompt, param, add_special_tokens)
        checked_ids(server, found, param)
        check_length(server, found, param)
        return found

    for prompt in prompts:
        check_length(server, prompt, param)
    return await mapped(made, prompts)


async def ids(
    server: state.ServerState, prompt: Prompt, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the checked token ids of one prompt."""
    (found,) = await all_ids(server, [prompt], param, add_special_tokens=add_special_tokens)
    return found


async def suffix_ids(server: state.ServerState, suffix: str | None) -> list[int]:
    """Returns the ids of a suffix, without a token that marks its beginning; [] without one."""
    if not suffix:
        return []
    check_length(server, suffix, "suffix")
    encode = functools.partial(server.tokenizer.encode, add_special_tokens=False)
    return await offload.off_loop(len(suffix), encode, suffix)


def check_length(server: state.ServerState, prompt: Prompt, param: str) -> None:
    """Raises for a prompt that is too long for the context, whatever its tokens are."""
    context = server.engine.context_length
    is_text = isinstance(prompt, str)
    limit = min(context * MAX_CHARACTERS_PER_TOKEN, MAX_CHARACTERS) if is_text else context
    if len(prompt) > limit:
        raise errors.RequestTooLong(
            f"{errors.maximum_context(context)}, but {param} has {len(prompt)} "
            f"{'characters' if is_text else 'tokens'}; shorten it",
            param=param,
        )


def checked_ids(server: state.ServerState, ids: list[int], param: str) -> list[int]:
    """Returns `ids`, not empty, if all are in the vocabulary."""
    vocab_size = server.engine.spec.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise errors.RequestError(
            f"token id {errors.quote(bad)} is outside the vocabulary of {vocab_size}", param=param
        )
    return ids


async def mapped(function: Callable[[Any], Result], prompts: Sequence[Prompt]) -> list[Result]:
    """Returns function(prompt) for each; much work is done in slices, in a thread."""
    results: list[Result] = []
    for part in _slices(prompts):
        size = sum(map(len, part)) + SIZE_OF_A_PROMPT * len(part)
        results += await offload.off_loop(size, lambda part=part: [function(one) for one in part])
    return results


def _slices(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Yields parts of a list that each are about one slice of work."""
    part: list[Prompt] = []
    size = 0
    for prompt in prompts:
        part.append(prompt)
        size += len(prompt) + SIZE_OF_A_PROMPT
        if size >= offload.SLICE_SIZE:
            yield part
            part, size = [], 0
    if part:
        yield part


async def texts(
    server: state.ServerState, prompts: Sequence[Prompt], *, skip_special_tokens: bool
) -> list[str]:
    """Returns the texts of prompts, which may be given as ids."""
    decode = functools.partial(server.tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return await mapped(lambda one: one if isinstance(one, str) else decode(one), prompts)


def default_tokens(server: state.ServerState, prompt_len: int, default: int) -> int:
    """Returns the default output limit, or what is left of the context if that is less."""
    return min(default, server.engine.default_max_new_tokens(prompt_len))


def _encoded(
    server: state.ServerState, prompt: Prompt, param: str, add_special_tokens: bool
) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    tokenizer = server.tokenizer
    try:
        found = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    except Exception as error:  # about this text, as the tokenizer itself is tried at start
        logger.exception("the tokenizer failed")
        raise field_at_fault.unreadable(error, param) from error
    if not found:
        raise errors.RequestError(f"{param} has no tokens", param=param)
    return found
