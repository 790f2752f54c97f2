"""Files that are written whole or not at all, in folders that are known to be writable."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile


def make_writable(folder: pathlib.Path) -> None:
    """Makes a folder where there is none; an OSError if nothing can be written there.

    Commands ask before work that takes long, whose results they would lose.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Its name is taken away again at once; only writing tells whether one may write.
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_writable_above(path: pathlib.Path) -> None:
    """Raises an OSError if `path` could not be made; makes no folder."""
    above = path.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    make_writable(above)


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old or the new content, never a part.

    Raises an OSError where that fails, and then leaves what was there.
    """
    scratch = path.with_suffix(".part")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
