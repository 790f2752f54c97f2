"""Tuned tile parameters: data, in each op's folder `tiles/` one JSON file per device.

A file is a list of entries `{"when": {size: upper bound}, "tile": {parameter: value}}`. An entry
may also have `"equal": {size: value}`. `lookup` takes the first entry that fits: no size of the
problem is above its bound in `when`, and every size in `equal` is the same. The last entry has no
condition, so it always fits. Sizes are static facts of a compiled shape, never live lengths: a
row's rounding must not depend on its neighbours. An op may read an empty tile as "no tile is
known". `scripts/tune_kernels.py` writes the files.
"""

import functools
import json
import pathlib
from typing import Any

from pallas_kernels import device

OPS_DIR = pathlib.Path(__file__).parent
DEFAULT_DEVICE = "nvidia_h200"  # also serves devices of the same generation without a table


def device_name() -> str:
    """Returns the device's name in file names: "NVIDIA H200" -> "nvidia_h200"."""
    return "_".join(device.local_device().kind.lower().replace("-", " ").split())


def path_of(op: str, device: str) -> pathlib.Path:
    """Returns the path of an op's table for a device; the file need not exist."""
    return OPS_DIR / op / "tiles" / f"{device}.json"


def entries(op: str) -> tuple[dict[str, Any], ...]:
    """Returns the op's entries for this device, or for the default device if there are none.

    Raises ValueError for a file that is not a list of entries, and for one whose last entry has a
    condition.
    """
    path = path_of(op, device_name())
    if not path.exists():
        path = path_of(op, DEFAULT_DEVICE)
    return _read(path)


def lookup(op: str, **sizes: int) -> dict[str, Any]:
    """Returns the tile parameters of `op` for a problem of these sizes."""
    for entry in entries(op):
        bounded = all(sizes[name] <= bound for name, bound in entry["when"].items())
        if bounded and all(sizes[name] == n for name, n in entry.get("equal", {}).items()):
            return dict(entry["tile"])
    raise AssertionError(f"{op}: the last entry has no condition")


@functools.cache
def _read(path: pathlib.Path) -> tuple[dict[str, Any], ...]:
    found = json.loads(path.read_text(encoding="utf-8"))
    known = all({"when", "tile"} <= set(entry) <= {"when", "equal", "tile"} for entry in found)
    if not found or not known or found[-1]["when"] or found[-1].get("equal"):
        raise ValueError(f"{path}: a list of when/equal/tile entries, the last without a condition")
    return tuple(found)
