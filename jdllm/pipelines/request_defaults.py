"""Options that a pipeline folder gives to requests that do not say: `generation_config.json`.

Pipelines of diffusers have their defaults in the code of their class. But models of one class may
need other ones. The file has the name of the one that language models have, and the names of the
options of requests:

    {"num_inference_steps": 8, "guidance_scale": 2.0}
"""

from __future__ import annotations

import pathlib
from typing import Any

from jdllm import errors, value_checks
from jdllm.checkpoint import source

FILE_NAME = "generation_config.json"
MAX_STEPS, MAX_GUIDANCE = 1000, 100.0  # as of requests


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the options of a file; raises a ConfigError that names what it cannot hold."""
    values = source.read_json(path)
    try:
        for key, value in values.items():
            _check(key, value)
    except errors.RequestError as error:
        raise errors.ConfigError(str(error)) from error
    return values


def _check(key: str, value: Any) -> None:
    match key:
        case "num_inference_steps":
            value_checks.check_integer(value, key, low=1, high=MAX_STEPS)
        case "guidance_scale":
            value_checks.check_number(value, key, low=0, high=MAX_GUIDANCE)
        case _:
            raise errors.ConfigError(
                f"{errors.quote(key)} is no option that a folder may give: num_inference_steps or "
                "guidance_scale"
            )
