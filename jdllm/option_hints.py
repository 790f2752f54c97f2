"""Where options are written that are unknown at start, or beside a `sampling_params`."""

from __future__ import annotations

from collections.abc import Collection

from jdllm import algorithms, errors, foreign_flags, foreign_names, sampling_params

_SAMPLING = sampling_params.SamplingParams.__dataclass_fields__
_OF_REQUESTS = {"{} with the request": _SAMPLING}
# For a call or a body that has `sampling_params`.
BESIDE_SAMPLING_PARAMS: foreign_names.Places = {
    "sampling_params.{}": _SAMPLING,
    **algorithms.places("sampling_params.dllm.{}"),
}


def of_start(name: str, known: Collection[str]) -> str:
    """Returns the hint for an unknown option of the engine or the server, or ""."""
    alias = foreign_flags.ALIASES.get(name)
    if alias in known:
        return f"; write {alias}"
    found = foreign_flags.refusal(name)
    found = found or foreign_names.served(name, known, places("dllm_algorithm_config.{}"))
    return f"; {found}" if found else errors.nearest(name, known)


def of_default(name: str, known: Collection[str]) -> str:
    """Returns the hint for an unknown key of `dllm_algorithm_config`, or ""."""
    return foreign_names.hint(name, known, _OF_REQUESTS)


def places(pattern: str) -> foreign_names.Places:
    """Returns what is no option at start: defaults of algorithms, and options of requests.

    `pattern` says how the defaults are written.
    """
    return {**algorithms.places(pattern), **_OF_REQUESTS}
