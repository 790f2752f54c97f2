"""A 400 that names the field for what fails unforeseen while a request is checked.

Every check is meant to raise a `RequestError`. Where one fails on a value that nobody thought of,
the request is at fault all the same, and its sender learns which field it was.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic

from jdllm import errors

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_FIELDS = 100  # every one of them is tried


def naming(build: Callable[[dict[str, Any]], Result], fields: dict[str, Any]) -> Result:
    """Returns build(fields). What fails unforeseen is a 400, too, and names the field at fault.

    `build` only checks and converts: a fault in it lies in the request, never in the engine.
    """
    try:
        return build(fields)
    except (errors.RequestError, pydantic.ValidationError, MemoryError):
        raise
    except Exception as error:
        logger.exception("a check of a request failed")
        raise unreadable(error, _field_at_fault(build, fields, type(error))) from error


def unreadable(error: Exception, param: str | None) -> errors.RequestError:
    """Returns the 400 for a field on which a check itself failed."""
    what = param or "the body"
    return errors.RequestError(f"{what} cannot be read ({type(error).__name__})", param=param)


def _field_at_fault(
    build: Callable[[dict[str, Any]], object], fields: dict[str, Any], failure: type[Exception]
) -> str | None:
    """Returns the field without which `build` does not fail as it does with all of them."""
    fallback = None
    for name in itertools.islice(fields, MAX_FIELDS):
        try:
            build({key: value for key, value in fields.items() if key != name})
        except failure:
            continue
        except Exception:  # The name of a required field, or one that hides the failure.
            fallback = fallback or name
        else:
            return name
    return fallback
