"""Where options are written that are unknown at start, or beside a `sampling_params`."""

from __future__ import annotations

from collections.abc import Collection

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.foreign import flags, names
from jdllm.options import sampling_params

_SAMPLING = sampling_params.SamplingParams.__dataclass_fields__
_OF_REQUESTS = {"{} with the request": _SAMPLING}
# For a call or a body that has `sampling_params`.
BESIDE_SAMPLING_PARAMS: names.Places = {
    "sampling_params.{}": _SAMPLING,
    **lookup.places("sampling_params.dllm.{}"),
}


def of_start(name: str, known: Collection[str]) -> str:
    """Returns the hint for an unknown option of the engine or the server, or ""."""
    alias = flags.ALIASES.get(name)
    if alias in known:
        return f"; write {alias}"
    found = flags.refusal(name)
    found = found or names.served(name, known, places("dllm_algorithm_config.{}"))
    return f"; {found}" if found else errors.nearest(name, known)


def of_default(name: str, known: Collection[str]) -> str:
    """Returns the hint for an unknown key of `dllm_algorithm_config`, or ""."""
    return names.hint(name, known, _OF_REQUESTS)


def places(pattern: str) -> names.Places:
    """Returns what is no option at start: defaults of algorithms, and options of requests.

    `pattern` says how the defaults are written.
    """
    return {**lookup.places(pattern), **_OF_REQUESTS}
