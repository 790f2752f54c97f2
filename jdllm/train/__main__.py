"""Trains a small diffusion language model from scratch: `jdllm train --config FILE`."""

from __future__ import annotations

import json
import logging
import pathlib
import signal
import sys

from jdllm import errors
from jdllm.host import arguments
from jdllm.train import checkpoints, loop, recipes, stop_request

PROG = "jdllm train"


def main(argv: list[str] | None = None) -> int:
    """Trains, prints the final numbers as one JSON line, returns the exit code.

    It is 1 when a checkpoint could not be written, 2 for a wrong option, config or folder, and 130
    or 143 after Ctrl-C or SIGTERM.
    """
    args = make_parser().parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    for name in ("absl", "jax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    paths = loop.RunPaths(
        output_dir=args.output_dir or pathlib.Path("runs") / args.config.stem,
        import_state=args.import_state,
        export_state=args.export_state,
        is_resumed=args.resume == "auto",
    )
    stop = stop_request.StopRequest()
    try:
        with stop.listening():
            final = loop.train(recipes.load(args.config, args.set), paths, stop)
    except (errors.ConfigError, OSError) as error:
        arguments.report(PROG, error)
        return 2
    except checkpoints.WriteError as error:
        arguments.report(PROG, error)
        return 1
    except KeyboardInterrupt:
        number = stop.signal or signal.SIGINT
        arguments.report(PROG, f"stopped by {number.name}; {_what_is_kept(paths)}")
        return 128 + number
    sys.stdout.write(json.dumps(final) + "\n")
    return 0


def _what_is_kept(paths: loop.RunPaths) -> str:
    folder, old = paths.checkpoints, paths.old_checkpoints
    newest = checkpoints.newest(folder)
    if newest is None:
        kept = f"; those of the run before are in {old}" if old.exists() else ""
        return f"there is no checkpoint in {folder} yet{kept}"
    return f"the same command resumes from step {newest}, the newest checkpoint in {folder}"


def make_parser() -> arguments.Parser:
    parser = arguments.Parser(PROG, __doc__)
    parser.add_argument("--config", type=pathlib.Path, required=True, help="YAML of a recipe")
    parser.add_argument(
        "--output-dir", type=pathlib.Path, help="folder (default: runs/NAME for a config NAME.yaml)"
    )
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto: resume from the newest checkpoint in the output folder, with the settings of "
        "its run; never: begin anew; the folder's curve is deleted, its checkpoints once the new "
        "run has one",
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override config keys",
    )
    parser.add_argument(
        "--export-state",
        type=pathlib.Path,
        metavar="FILE",
        help="also write weights as FILE.0.npz, FILE.1.npz, ...",
    )
    parser.add_argument(
        "--import-state",
        type=pathlib.Path,
        metavar="FILE",
        help="start from weights written by --export-state, or from a model folder or a bundled "
        "model",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
