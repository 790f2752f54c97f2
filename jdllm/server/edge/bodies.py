"""Request bodies: the typed fields that each route reads, and the errors for bad bodies.

A body must be JSON with the right content type; anything else is a 400. Types are strict ("5"
is not 5), because a silent conversion would change what was asked for. Ranges are checked in
one place, `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
import pydantic
from starlette import requests

from jdllm import errors, value_checks
from jdllm.foreign import neutral_values
from jdllm.host import offload
from jdllm.options import sampling_params
from jdllm.server.edge import body_limits, field_at_fault
from jdllm.server.edge.request_model import RequestModel, first_problem

MAX_RID_CHARACTERS = 256
# Parsing is that much faster than tokenising.
BYTES_PER_CHARACTER_OF_WORK = 4


Body = TypeVar("Body", bound=RequestModel)


async def read(request: requests.Request, model: type[Body]) -> Body:
    """Returns the parsed body of `request`, or raises a `RequestError` naming the field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise errors.RequestError(
            f"Content-Type must be application/json, got {errors.quote(content_type or 'none')}"
        )
    body = await request.body()
    return await offload.off_loop(len(body) // BYTES_PER_CHARACTER_OF_WORK, parse, body, model)


def parse(body: bytes, model: type[Body]) -> Body:
    """Returns a body as a checked `model`, or raises a `RequestError` naming the field."""
    body_limits.check(body)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise errors.RequestError(f"the body must be an object, got {type(content).__name__}")
    try:
        return field_at_fault.naming(model.model_validate, content)
    except pydantic.ValidationError as error:
        raise first_problem(error) from error


def part(model: type[Body], content: Any, name: str) -> Body:
    """Returns a part of a body as `model`; errors name the field below `name`."""
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        problem = first_problem(error)
        param = name if problem.param is None else f"{name}.{problem.param}"
        raise errors.RequestError(f"{name}: {problem}", param=param, code=problem.code) from error


def sampling_from(options: dict[str, Any]) -> sampling_params.SamplingParams:
    """Returns checked options from JSON; a container of the wrong type is a 400, too."""
    for name, kinds in (("stop", (str, list)), ("stop_token_ids", (list,)), ("dllm", (dict,))):
        value = options.get(name)
        if not (value is None or neutral_values.is_empty(value) or isinstance(value, kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise errors.RequestError(
                f"{name} must be a {wanted}, got {errors.quote(value)}", param=name
            )
    return field_at_fault.naming(sampling_params.SamplingParams.from_mapping, options)


def renamed(error: errors.RequestError, names: Mapping[str, str]) -> errors.RequestError:
    """Returns `error` with the names that its fields have in the request's body."""
    if error.param is None:
        return error
    message = str(error)
    for limit in ("max_new_tokens", "min_new_tokens"):
        message = message.replace(limit, names.get(limit, limit))
    # Only where a value follows: "the prompt has 9 tokens" is about no field.
    message = message.replace(f"{error.param}=", f"{names.get(error.param, error.param)}=")
    return type(error)(message, param=names.get(error.param, error.param), code=error.code)


def no_likelihood(param: str) -> errors.RequestError:
    """Returns the error for a field that asks for log-probabilities of a prompt."""
    return errors.RequestError(
        "a diffusion model has no chain-rule likelihood of a prompt, so prompts are not scored "
        "here and `select` of SGLang's language cannot choose; only new tokens have "
        "log-probabilities",
        param=param,
    )


def check_rid(rid: str) -> None:
    """Raises a `RequestError` for an id that is empty or too long: every choice has a copy."""
    if not 1 <= len(rid) <= MAX_RID_CHARACTERS:
        raise errors.RequestError(
            f"rid must have 1 to {MAX_RID_CHARACTERS} characters, got {len(rid)}", param="rid"
        )


def token_ids(value: Any) -> list[int] | None:
    """Returns a list of integers, written as 8.0, too; None for anything else, and for []."""
    if not isinstance(value, list):
        return None
    kinds = set(map(type, value))
    if float in kinds:
        value = [value_checks.whole(one) for one in value]
        kinds = set(map(type, value))
    return value if kinds == {int} else None


def rows_of_ids(value: Any) -> list[list[int]] | None:
    """Returns a list of lists of integers; None for anything else, and for []."""
    rows = [token_ids(one) for one in value] if isinstance(value, list) else []
    found = [one for one in rows if one is not None]
    return found if found and len(found) == len(rows) else None
