"""The base of all request bodies, and how an error of pydantic becomes one that names a field."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pydantic
from pydantic import StrictStr

from jdllm import errors, foreign_names
from jdllm.server import foreign_fields

# What an answer repeats, some in every part of a stream, must not make it many times the request.
ModelName = Annotated[StrictStr, pydantic.Field(max_length=1024)]  # a path on a disk at the longest


class RequestModel(pydantic.BaseModel):
    """A body; further fields must be in `foreign` with a neutral value, or they are refused.

    `hints` pass with any value. `places` are names that are served inside of other fields.
    """

    model_config = pydantic.ConfigDict(extra="allow", protected_namespaces=())
    foreign: ClassVar[foreign_fields.Neutral] = {}
    hints: ClassVar[frozenset[str]] = frozenset()
    places: ClassVar[foreign_names.Places] = {}

    @pydantic.model_validator(mode="after")
    def _refuse_foreign(self) -> RequestModel:
        extra = {k: v for k, v in (self.model_extra or {}).items() if k not in self.hints}
        foreign_fields.check(extra, self.foreign, type(self).model_fields, self.places)
        return self


def first_problem(error: pydantic.ValidationError) -> errors.RequestError:
    """Returns the first problem of a body, with the path of its field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, errors.RequestError):
        path += [cause.param] if cause.param else []
        return errors.RequestError(str(cause), param=".".join(path) or None, code=cause.code)
    name = ".".join(path)
    if first["type"] == "missing":
        return errors.RequestError(f"{name} is required", param=name)
    got = errors.quote(first["input"])
    return errors.RequestError(f"{name}: {first['msg']}, got {got}", param=name)
