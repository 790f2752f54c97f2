"""The `jdllm` command: `jdllm serve` runs `python -m jdllm.serve`, and so on.

No command is imported here, so `jdllm --help` and `--version` answer at once.
"""

from __future__ import annotations

import runpy
import sys

from jdllm import errors, version
from jdllm.host import arguments

# The words of a command -> its module, and what it does.
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("serve",): ("jdllm.serve", "serve a model over HTTP"),
    ("eval",): ("jdllm.eval", "accuracy and speed of a task, in process or against a server"),
    ("bench", "serving"): ("jdllm.bench.serving", "load on a running server"),
    ("bench", "images"): ("jdllm.bench.images", "load on an image model, served or in process"),
    ("bench", "one-batch"): ("jdllm.bench.one_batch", "latency of a closed batch"),
    ("bench", "offline-throughput"): (
        "jdllm.bench.offline_throughput",
        "throughput of many prompts at once, in process",
    ),
    ("plot",): ("jdllm.plots", "plots of benchmark results and training curves"),
    ("train",): ("jdllm.train", "train a small model from scratch"),
    ("convert",): ("jdllm.convert", "convert a checkpoint, so that it loads faster"),
}


def main() -> None:
    """Runs the command that the first words name; a module ends the process by itself.

    Ctrl-C while it is imported, for seconds, ends it without a traceback; later it is its own.
    """
    words = sys.argv[1:]
    for names, (module, _) in COMMANDS.items():
        if tuple(words[: len(names)]) == names:
            del sys.argv[1 : 1 + len(names)]
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except KeyboardInterrupt:
                arguments.report("jdllm " + " ".join(names), "interrupted")
                sys.exit(130)
            return
    parser = arguments.Parser("jdllm", description(), usage="%(prog)s COMMAND [OPTIONS]")
    parser.add_argument(
        "--version", action="version", version=f"jdllm {version.__version__}", help="the version"
    )
    _, rest = parser.parse_known_args(words)
    if not rest or rest == ["bench"]:
        parser.print_help()
        return
    if rest[0].startswith("-"):
        parser.refuse(rest)
    asked = " ".join(rest[: 2 if rest[0] == "bench" else 1])
    known = map(" ".join, COMMANDS)
    parser.error(f"unknown command {errors.quote(asked)}{errors.nearest(asked, known)}")


def description() -> str:
    """Returns the list of commands."""
    lines = [f"  {' '.join(names):26}{text}" for names, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["Diffusion language models in JAX. Commands:", "", *lines, "", "COMMAND --help says more."]
    )


if __name__ == "__main__":
    main()
