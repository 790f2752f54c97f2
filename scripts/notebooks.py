"""Keeps docs/notebooks: their "open in Colab" links, and the outputs that stand in them.

    python scripts/notebooks.py                # puts the links and the address into all notebooks
    python scripts/notebooks.py --execute      # also runs them and keeps what they show
    python scripts/notebooks.py --execute quickstart

The repository's address is here and nowhere else: a fork changes one line and runs this script.
Needs `pip install '.[notebooks]'`. The tests run the same function on a CPU.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import tempfile
from typing import Any

import nbclient
import nbformat

REPOSITORY = "https://github.com/OWNER/jdllm"
ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
CELL_TIMEOUT_S = 1800  # engines compile, on a busy machine slowly


def link(name: str) -> str:
    """Returns the Markdown of the link that opens a notebook in Colab."""
    path = REPOSITORY.removeprefix("https://github.com/")
    url = f"https://colab.research.google.com/github/{path}/blob/main/docs/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({BADGE})]({url})"


def read(name: str) -> Any:
    """Returns a notebook of the folder; nbformat gives it no type."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def with_address(notebook: Any, name: str) -> Any:
    """Puts link and address where they belong: into the first cell, and into the one that installs.

    Raises ValueError if one of them has no place.
    """
    title, install = notebook.cells[:2]
    title.source, links = re.subn(r"\[!\[Open in Colab\].*", lambda _: link(name), title.source)
    line = f'REPOSITORY = "{REPOSITORY}"'
    install.source, addresses = re.subn(r"^REPOSITORY = .*", line, install.source, flags=re.M)
    if (links, addresses) != (1, 1):
        raise ValueError(f"{name}: {links} links in cell 1, {addresses} addresses in cell 2, not 1")
    return notebook


def execute(notebook: Any, folder: pathlib.Path) -> Any:
    """Runs all cells in a kernel of this interpreter, in a folder; a cell that fails raises.

    Progress (stderr) and widgets are left out of the outputs.
    """
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if is_kept(one)]
            for one in cell.outputs:
                one.get("data", {}).pop("image/jpeg", None)  # PIL gives the PNG, too
    notebook.metadata.pop("widgets", None)
    return notebook


def is_kept(output: Any) -> bool:
    """Returns whether an output of a cell belongs into the file."""
    if output.output_type == "stream":
        return output.name == "stdout"
    return "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


def main() -> int:
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="(default: all)")
    parser.add_argument("--execute", action="store_true", help="run them and keep their outputs")
    options = parser.parse_args()
    for name in options.names or names:
        notebook = with_address(read(name), name)
        if options.execute:
            sys.stderr.write(f"running {name}\n")
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, pathlib.Path(folder))
        nbformat.validate(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())
