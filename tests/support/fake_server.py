"""A server process around a fake engine: real sockets, signals and exit codes.

Run as a program: prints nothing but the log. Arguments: port, drain seconds, block
seconds, and `fail-config` or `fail` to fail at loading, or `images` for a model that makes images.
"""

from __future__ import annotations

import logging
import sys
import time

from support import fake_engine, fake_images

from jdllm import errors
from jdllm.engine.start import startup
from jdllm.options import config
from jdllm.server import lifecycle


def build(
    progress: startup.StartupProgress,
) -> fake_engine.FakeEngine | fake_images.FakeImageEngine:
    progress.enter("compile", total=4)
    for done in range(4):
        time.sleep(0.15)
        progress.advance(done + 1, 4)
    if sys.argv[4:] == ["fail-config"]:
        raise errors.ConfigError("the checkpoint is\nwrong")
    if sys.argv[4:] == ["fail"]:
        raise RuntimeError("out of memory")
    if sys.argv[4:] == ["images"]:
        return fake_images.FakeImageEngine(step_s=float(sys.argv[3]))
    return fake_engine.FakeEngine(block_s=float(sys.argv[3]))


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    server_config = config.ServerConfig(
        port=int(sys.argv[1]), drain_timeout_s=float(sys.argv[2]), enable_metrics=True
    )
    try:
        sys.exit(lifecycle.serve(server_config, build, startup.StartupProgress()))
    except errors.ConfigError as error:
        lifecycle.print_error(str(error))
        sys.exit(2)
