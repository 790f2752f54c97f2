"""How every plot looks, and how it is written: one PNG to look at and one SVG for documents.

matplotlib is an extra (`pip install 'jdllm[plot]'`). Figures are made without `pyplot`, so that
nothing asks for a display and nothing is global.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import TYPE_CHECKING, Any

from jdllm import errors

if TYPE_CHECKING:
    from matplotlib import axes, figure
try:
    import matplotlib
    from matplotlib import figure as figure_lib
except ImportError:  # every plot asks `check_installed` first
    matplotlib = figure_lib = None

# The palette of Okabe and Ito: told apart by colour-blind readers, too, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GRAY = "#595959"
WIDTH, HEIGHT, DPI = 4.6, 3.4, 150  # inches of one panel
RULES: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "jdllm",  # the same figure is the same file
}
SUFFIXES = (".png", ".svg")


def check_installed() -> None:
    """Raises a ConfigError that names the extra if matplotlib is missing."""
    if matplotlib is None:
        raise errors.ConfigError(
            "plots need matplotlib, which is not installed: pip install 'jdllm[plot]' (or leave "
            "the plot out)"
        )


def applied() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which everything is drawn by these rules."""
    check_installed()
    assert matplotlib is not None, "checked"
    return matplotlib.rc_context(RULES)


def panels(count: int, *, title: str) -> tuple[figure.Figure, list[axes.Axes]]:
    """Returns a figure with panels side by side."""
    check_installed()
    assert figure_lib is not None, "checked"
    drawn = figure_lib.Figure(figsize=(WIDTH * count, HEIGHT + 0.3), dpi=DPI, layout="constrained")
    drawn.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    return drawn, list(drawn.subplots(1, count, squeeze=False)[0])


def save(drawn: figure.Figure, name: str) -> list[pathlib.Path]:
    """Writes NAME.png and NAME.svg and returns the paths; a suffix of the name does not matter."""
    base = pathlib.Path(name)
    base = base.with_suffix("") if base.suffix in SUFFIXES else base
    paths = [base.with_name(base.name + suffix) for suffix in SUFFIXES]
    for path in paths:
        is_svg = path.suffix == ".svg"
        try:
            # A date would make every SVG another file.
            drawn.savefig(path, metadata={"Date": None} if is_svg else None)
        except OSError as error:
            raise errors.ConfigError(f"cannot write {path}: {error.strerror}") from error
    return paths
