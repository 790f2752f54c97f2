"""`jdllm plot FILE`: a PNG and an SVG of result files.

Files are those of `jdllm bench one-batch` and `bench serving`, and curves of `jdllm train`; several
files of one kind are drawn side by side. `jdllm eval --sweep` and `jdllm bench images --compare`
draw their plots themselves.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from jdllm import errors
from jdllm.host import arguments
from jdllm.plots import results, style

PROG = "jdllm plot"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a wrong option or file."""
    parser = arguments.Parser(PROG, __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON lines of results")
    parser.add_argument(
        "--output-file", metavar="NAME", help="for NAME.png and NAME.svg (default: beside FILE)"
    )
    options = parser.parse(argv)
    try:
        style.check_installed()
        name = options.output_file or str(pathlib.Path(options.files[0]).with_suffix(""))
        files = {label: results.read(path) for label, path in labels(options.files).items()}
        for path in results.save(files, name):
            sys.stdout.write(f"wrote {path}\n")
    except errors.ConfigError as error:
        arguments.report(PROG, error)
        return 2
    return 0


def labels(paths: Sequence[str]) -> dict[str, str]:
    """Returns label -> path: the names of the files, or the paths where names are equal."""
    names = [pathlib.Path(path).stem for path in paths]
    is_clear = len(set(names)) == len(names)
    return dict(zip(names if is_clear else paths, paths))


if __name__ == "__main__":
    sys.exit(main())
