"""The argument parser of every command, and how a command says why it ends.

It takes no abbreviations, and its help has a default beside every flag.

An unknown flag is answered with the nearest one that exists. The help takes each default from the
flag itself, so that no text can contradict the code.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jdllm import errors
from jdllm.foreign import names


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to each help text that does not name it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "(default" in text or action.default is argparse.SUPPRESS:
            return text
        if action.required:
            return f"{text} (required)"
        return f"{text} (default: {shown_default(action.default)})"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if isinstance(action, OneName):
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class OneName(argparse.Action):
    """Takes the names that vLLM's `--served-model-name` may list, and refuses a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if len(values) > 1:
            parser.error(
                f"{option_string} takes one name, not {len(values)}: requests may name any model "
                "unless --strict-model-name is set"
            )
        setattr(namespace, self.dest, values[0])


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, so that no flag is mistaken for another."""

    def __init__(self, prog: str, description: str | None, *, usage: str = "%(prog)s [OPTIONS]"):
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=Formatter,
            allow_abbrev=False,
        )

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Returns the flags; an unknown one ends the process with code 2."""
        with self._nothing_required():
            _, rest = self.parse_known_args(argv)
        if rest:
            self.refuse(rest)
        return self.parse_args(argv)

    @contextlib.contextmanager
    def _nothing_required(self) -> Iterator[None]:
        """A mistyped flag is an unknown one before the right one is a missing one."""
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        try:
            yield
        finally:
            for action in required:
                action.required = True

    def refuse(self, rest: Sequence[str], places: names.Places | None = None) -> NoReturn:
        """Ends the process: names the first argument that nobody took, and what is served.

        `places` are options that are no flags, and how they are written.
        """
        flags = [word for word in rest if word.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {errors.quote(rest[0])}")
        flag = flags[0].partition("=")[0]
        shown = (one for one in self._actions if one.help != argparse.SUPPRESS)
        known = {_bare(word): word for action in shown for word in action.option_strings}
        close = errors.near(_bare(flag), known)
        hint = "--help lists the options" if close is None else f"did you mean {known[close]}?"
        written = names.served(_bare(flag).replace("-", "_"), (), places)
        self.error(f"unknown option {errors.quote(flag)}; {written or hint}")


def _bare(flag: str) -> str:
    return flag.lstrip("-")


def report(prog: str, error: object) -> None:
    """Writes to stderr why the program `prog` ends, as its parser does for a wrong option."""
    sys.stderr.write(f"{prog}: error: {error}\n")
    sys.stderr.flush()


def shown_default(value: object) -> str:
    """Returns a default as the help shows it."""
    if value is None or value == "" or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(map(shown_default, value))
    return str(value)
