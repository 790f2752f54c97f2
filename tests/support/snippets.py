"""The code blocks of the documentation, and the parsers of the commands in them."""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jdllm import convert
from jdllm.bench import offline_throughput, one_batch, serving
from jdllm.bench.images import __main__
from jdllm.eval import __main__ as eval_main
from jdllm.host import arguments
from jdllm.plots import __main__ as plots_main
from jdllm.server import cli
from jdllm.train import __main__ as train_main

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
# What a command does with its words; all begin by making a parser.
MAINS: dict[tuple[str, ...], Callable[[Sequence[str]], Any]] = {
    ("serve",): cli.parse,
    ("eval",): eval_main.main,
    ("bench", "serving"): serving.main,
    ("bench", "images"): __main__.main,
    ("bench", "one-batch"): one_batch.main,
    ("bench", "offline-throughput"): offline_throughput.main,
    ("plot",): plots_main.main,
    ("train",): train_main.main,
    ("convert",): convert.main,
}


class Found(Exception):
    """Carries the parser of a command out of it."""


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def commands(pages: Sequence[str] = tuple(PAGES)) -> list[tuple[str, ...]]:
    """Returns the words of each command line of ours on these pages."""
    lines = [line for page in pages for text in blocks(page, "bash") for line in text.splitlines()]
    ours = [re.sub(r"^.*&& python -m jdllm\.", "jdllm ", line) for line in lines]
    return [tuple(shlex.split(line)) for line in ours if line.startswith("jdllm ")]


def parser_of(names: tuple[str, ...]) -> arguments.Parser:
    """Returns the parser that a command makes."""

    def stop(self: arguments.Parser, *_: object) -> None:
        raise Found(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Found) as caught:
        patch.setattr(arguments.Parser, "parse_known_args", stop)
        MAINS[names]([])
    return caught.value.args[0]
