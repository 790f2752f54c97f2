"""A disk without room, by the limit of the size of a file."""

import contextlib
import resource


@contextlib.contextmanager
def largest_file(size):
    """Writes past `size` bytes of a file fail: like a full disk, after a part of the bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
