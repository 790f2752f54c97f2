"""The base of all request bodies, and how an error of pydantic becomes one that names a field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

import pydantic
from pydantic import StrictInt, StrictStr

from jdllm import errors, value_checks
from jdllm.foreign import fields, names, neutral_values

# An integer, which may be written as 8.0; 8.5, "8" and true are none.
Integer = Annotated[StrictInt, pydantic.BeforeValidator(value_checks.whole)]

# What an answer repeats, some in every part of a stream, must not make it many times the request.
ModelName = Annotated[StrictStr, pydantic.Field(max_length=1024)]  # a path on a disk at the longest


class RequestModel(pydantic.BaseModel):
    """A body; further fields must be in `foreign` with a neutral value, or they are refused.

    `hints` pass with any value. `places` are names that are served inside of other fields. An empty
    value (`neutral_values`) of an optional field is none, except for `false` of a flag and for the
    fields `meant_when_empty`.
    """

    model_config = pydantic.ConfigDict(extra="allow", protected_namespaces=())
    foreign: ClassVar[fields.Neutral] = {}
    hints: ClassVar[frozenset[str]] = frozenset()
    places: ClassVar[names.Places] = {}
    meant_when_empty: ClassVar[frozenset[str]] = frozenset()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_empty(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        return {name: value for name, value in content.items() if cls._says(name, value)}

    @classmethod
    def _says(cls, name: str, value: Any) -> bool:
        """Says whether a value of the body is more than an empty one of an optional field."""
        field = cls.model_fields.get(name)
        if field is None or not neutral_values.is_empty(value) or name in cls.meant_when_empty:
            return True
        return field.is_required() or (value is False and _takes_bool(field.annotation))

    @pydantic.model_validator(mode="after")
    def _refuse_foreign(self) -> RequestModel:
        extra = {k: v for k, v in (self.model_extra or {}).items() if k not in self.hints}
        fields.check(extra, self.foreign, type(self).model_fields, self.places)
        return self


def _takes_bool(annotation: Any) -> bool:
    return annotation is bool or any(map(_takes_bool, get_args(annotation)))


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
