"""Reads the tokenizer folder of a pipeline: tokenizer.json, or the parts of an older class.

Every loader neither cuts nor pads, and raises a ConfigError that names the file.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from jdllm import errors
from jdllm.checkpoint import source, tokenizer_checks
from jdllm.checkpoint.quiet_transformers import transformers

TOKENIZER_NAME = "tokenizer.json"
PARTS = ("vocab.json", "merges.txt")  # of a tokenizer without tokenizer.json

ReadParts = Callable[[pathlib.Path], tokenizers.Tokenizer]


def load(
    directory: pathlib.Path, *, vocab_size: int, read_parts: ReadParts | None
) -> tokenizers.Tokenizer:
    """Returns a tokenizer; without tokenizer.json it is what `read_parts` makes of the parts.

    Without `read_parts` the older class writes a model of sentencepiece, which is not read. Raises
    a ConfigError also if an id is outside the vocabulary of the encoder.
    """
    tokenizer_checks.check(directory)
    path = directory / TOKENIZER_NAME
    is_whole = path.is_file()
    if not is_whole:
        _check_parts(path, read_parts)
    read_from = path if is_whole else directory
    try:
        if is_whole or read_parts is None:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        else:
            tokenizer = read_parts(directory)
    except Exception as error:  # the libraries raise plain Exceptions
        raise errors.ConfigError(f"{read_from} is no usable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest not in range(vocab_size):
        raise errors.ConfigError(
            f"{read_from}: the largest id is {largest}, but the text encoder has a vocabulary of "
            f"{vocab_size}"
        )
    return tokenizer


def qwen2(directory: pathlib.Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of Qwen2's parts; the published Qwen-Image has no others."""
    read = transformers.Qwen2Tokenizer.from_pretrained
    return read(str(directory), local_files_only=True).backend_tokenizer


def clip(directory: pathlib.Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of CLIP's parts; the published FLUX.1 has no others."""
    read = transformers.CLIPTokenizer.from_pretrained
    return read(str(directory), local_files_only=True).backend_tokenizer


def read_config(directory: pathlib.Path) -> Mapping[str, Any]:
    """Returns what tokenizer_config.json holds; nothing without the file."""
    return source.read_optional_json(directory / tokenizer_checks.CONFIG_NAME)


def _check_parts(path: pathlib.Path, read_parts: ReadParts | None) -> None:
    """Raises unless there is something to read in place of tokenizer.json."""
    if read_parts is None:
        raise errors.ConfigError(
            f"{path} does not exist, and a spiece.model alone is not read; where sentencepiece is "
            "installed, transformers makes the file: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if not all((path.parent / name).is_file() for name in PARTS):
        raise errors.ConfigError(f"{path} does not exist, nor do {' and '.join(PARTS)}")
