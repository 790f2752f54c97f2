"""Converts a checkpoint once, so that every later start restores it straight to the device.

    jdllm convert --model-path SRC --output DST [--dtype bfloat16]

DST is a complete model directory (config, tokenizer, parameters): serve it with
`--model-path DST`. Of an image pipeline every component with weights is converted. An adapter for
drafts is copied as it is.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

from jdllm import errors
from jdllm.checkpoint import orbax_checkpoint, source, weight_files
from jdllm.host import arguments, files
from jdllm.models import loading, registry
from jdllm.options import config
from jdllm.pipelines import folder as pipeline_folder

PROG = "jdllm convert"
# Files beside the weights that are copied: configuration, tokenizer and chat template.
_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})


def convert(
    model_path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    revision: str | None = None,
    variant: str | None = None,
    show_progress: bool = True,
) -> pathlib.Path:
    """Writes the converted model to `output`, which must not exist, and returns it.

    `variant` is for image pipelines: the weights that are read, where a component has them.
    """
    output = pathlib.Path(output)
    if output.exists():
        raise errors.ConfigError(f"{output} exists; give a directory that does not exist yet")
    # Before gigabytes are fetched and read.
    try:
        files.check_writable_above(output)
    except OSError as error:
        raise errors.ConfigError(f"output {output} cannot be written: {error}") from error
    directory = source.resolve(model_path, revision=revision, variant=variant)
    convert_into = functools.partial(_convert_pipeline, variant=variant)
    if not source.is_pipeline(directory):
        config.EngineConfig(variant=variant).check_for("text")
        convert_into = _convert_model
    # The files go to another directory, which is renamed at the end: an interrupted run leaves
    # no incomplete model at `output`.
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        convert_into(directory, partial, dtype, show_progress)
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # it would keep a full disk full
        raise
    return output


def _convert_model(
    directory: pathlib.Path, output: pathlib.Path, dtype: str, show_progress: bool
) -> None:
    model = loading.load(
        directory, dtype=dtype, load_format="safetensors", show_progress=show_progress
    )
    _copy_files(directory, output)
    adapter = registry.family(model.spec.architecture).draft_adapter
    if adapter is not None and adapter.is_in(directory):
        shutil.copytree(directory / adapter.folder, output / adapter.folder)
    orbax_checkpoint.save(output, model.params, dtype=str(model.params["norm.weight"].dtype))


def _convert_pipeline(
    directory: pathlib.Path,
    output: pathlib.Path,
    dtype: str,
    show_progress: bool,
    *,
    variant: str | None,
) -> None:
    """Converts one component after the other, so that one at a time is in memory."""
    folder = pipeline_folder.read(directory, load_format="safetensors", variant=variant)
    _copy_files(directory, output)
    for name in folder.component_names:
        _copy_files(directory / name, output / name)
    for name, model in folder.models.items():
        params = model.load(dtype, show_progress=show_progress).params
        stored = model.stored_dtype if dtype == "auto" else dtype
        orbax_checkpoint.save(output / name, params, dtype=stored)


def _copy_files(directory: pathlib.Path, output: pathlib.Path) -> None:
    """Copies what lies beside the weights, without folders, into a new directory."""
    output.mkdir(parents=True)
    for path in sorted(directory.iterdir()):
        is_of_weights = path.name == orbax_checkpoint.MARKER_NAME or weight_files.is_index(
            path.name
        )
        if path.suffix in _COPIED_SUFFIXES and not is_of_weights:
            shutil.copyfile(path, output / path.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = make_parser().parse(argv)
    try:
        convert(
            options.model_path,
            options.output,
            dtype=options.dtype,
            revision=options.revision,
            variant=options.variant,
        )
    except (errors.ConfigError, OSError) as error:
        arguments.report(PROG, error)
        return 2
    except KeyboardInterrupt:
        arguments.report(PROG, "interrupted; nothing is written")
        return 130
    return 0


def make_parser() -> arguments.Parser:
    parser = arguments.Parser(PROG, (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model-path",
        required=True,
        help="model directory, bundled model's name or Hugging Face id",
    )
    parser.add_argument("--output", required=True, help="directory to create")
    parser.add_argument(
        "--dtype", default="auto", choices=config.DTYPES, help="of the weights; auto keeps theirs"
    )
    parser.add_argument(
        "--revision", help="branch, tag or commit of the model (default: the newest)"
    )
    parser.add_argument(
        "--variant", help="image models: weights to read, such as fp16 (default: none)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
