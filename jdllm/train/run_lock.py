"""One run at a time in an output folder: two would mix their checkpoints and their curves."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import pathlib
from collections.abc import Iterator

from jdllm import errors

logger = logging.getLogger(__name__)

FILE = "run.lock"


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[None]:
    """Holds the folder, which is made where there is none, for the run of the block.

    The system lets go of it when the process ends, in whatever way; the file stays. Raises a
    ConfigError where another process holds it, and an OSError where nothing can be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.ConfigError(
                f"another process trains in {folder}; give another --output-dir, or end it"
            ) from error
        except OSError as error:  # some file systems of networks
            logger.info("%s cannot be locked (%s): see that no other run is in it", folder, error)
        yield
