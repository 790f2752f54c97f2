"""`serve run jdllm.ray_app:build model_path=... num_replicas=2`: replicas on Ray Serve.

`build` is what Ray Serve calls with the words of its command line, or with `args` of a YAML file.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from jdllm import errors

try:
    # An optional dependency, which the type checker's environment does not have.
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise errors.ConfigError(
        f"replicas need Ray Serve ({missing}): pip install 'jdllm[ray]'"
    ) from missing

from jdllm.replicas import ray_deployments
from jdllm.replicas.options import Options, parse


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application; keys are the options of `jdllm serve` and of `ReplicaConfig`.

    Values may be text. A wrong or unknown option is a ConfigError that names it.
    """
    return application(parse(args))


def application(options: Options) -> serve.Application:
    """Returns the application for checked options."""
    num_gpus = options.replicas.num_gpus
    if num_gpus is None:
        num_gpus = options.engine.tp_size if has_gpus() else 0
    return ray_deployments.application(options, num_gpus)


def has_gpus() -> bool:
    """Returns whether the cluster has GPUs; before Ray runs, whether this machine has."""
    if ray.is_initialized():
        return ray.cluster_resources().get("GPU", 0) > 0
    return any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
