"""`jdllm serve`, or `python -m jdllm.serve`: the HTTP server.

This module reads the options, configures logging (no other module does) and calls
`server.lifecycle`. Exit codes: 0 after a signal, 1 when the engine fails to start,
2 for a wrong option.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine.engine import Engine
from jdllm.engine.images.engine import ImageEngine
from jdllm.engine.start import startup
from jdllm.pipelines import folder
from jdllm.server import cli, lifecycle
from jdllm.server.edge import log_format
from jdllm.server.operations import summary

logger = logging.getLogger(__name__)

HTTP_LOGGERS = ("uvicorn", "jdllm.server.middleware")
# They report at lower levels what nobody asked for, such as a TPU that is not there.
QUIET_LOGGERS = ("jax", "absl")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns its exit code."""
    try:
        options = cli.parse(sys.argv[1:] if argv is None else argv)
        configure_logging(options)
        for line in options.describe():
            logger.debug("option %s", line)
        for note in options.notes:
            logger.info("%s", note)
        if options.engine.trust_remote_code:
            logger.info("--trust-remote-code: no remote code is ever run")
        if options.server.replicas > 1:
            # By name, so that nobody else waits for Ray, or needs it.
            return runpy.run_module("jdllm.replicas.command")["run"](options)
        build = functools.partial(build_engine, options)
        return lifecycle.serve(options.server, build, startup.StartupProgress())
    except errors.ConfigError as error:
        lifecycle.print_error(str(error))
        return lifecycle.CONFIG_EXIT_CODE


def build_engine(options: cli.Options, progress: startup.StartupProgress) -> Engine | ImageEngine:
    """Starts the engine, logs what it is and what it chose by itself, and returns it.

    The folder of the model tells whether it writes text or makes images.
    """
    given = options.engine

    def check_index(index: dict[str, Any], directory: pathlib.Path) -> None:
        given.check_for("images")
        folder.check_index(index, directory)

    directory = source.resolve(
        given.model_path,
        revision=given.revision,
        download_dir=given.download_dir,
        variant=given.variant,
        check_index=check_index,
    )
    is_pipeline = source.is_pipeline(directory)
    build = ImageEngine if is_pipeline else Engine
    engine = build(given, progress=progress)
    for field in dataclasses.fields(engine.config):
        value = getattr(engine.config, field.name)
        if value != getattr(options.engine, field.name):
            logger.debug("option %s=%r (chosen at start)", field.name, value)
    if isinstance(engine, ImageEngine):
        lines = summary.image_engine_lines(engine)
    else:
        lines = summary.engine_lines(engine)
    for line in lines:
        logger.info("%s", line)
    return engine


def configure_logging(options: cli.Options) -> None:
    """Sends the log to stderr at the levels that the options name."""
    logging.basicConfig(
        level=options.engine.log_level.upper(),
        force=True,  # libraries imported above leave handlers of their own on the root logger
    )
    log_format.install()
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in HTTP_LOGGERS:
        logging.getLogger(name).setLevel(options.server.log_level_http.upper())


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread may still be compiling, and joining it would hang.
    os._exit(code)
