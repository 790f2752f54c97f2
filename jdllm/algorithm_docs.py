"""The tables of the documentation that say what algorithms and their options are."""

from __future__ import annotations

from jdllm import value_checks
from jdllm.algorithm_options import Option
from jdllm.algorithms import of_kind


def markdown_table(kind: str) -> str:
    """Returns the algorithms of a kind with their options and defaults, as a table."""
    lines = ["| algorithm | writes | options and their defaults |", "|---|---|---|"]
    for number, algorithm in enumerate(of_kind(kind).values()):
        name = f"`{algorithm.name}`" + (" (the default)" if number == 0 else "")
        options = ", ".join(_shown(option) for option in algorithm.options)
        if algorithm.alternatives:
            options += f"; a request gives at most one of {', '.join(algorithm.alternatives)}"
        lines.append(f"| {name} | {algorithm.writes} | {options} |")
    return "\n".join(lines)


def markdown_options(kind: str) -> str:
    """Returns a table of what each option of a kind means."""
    lines = ["| option | algorithms | values | meaning |", "|---|---|---|---|"]
    meanings: dict[tuple[str, str, str], list[str]] = {}
    for algorithm in of_kind(kind).values():
        for option in algorithm.options:
            meaning = (option.name, _values(option), _meaning(option))
            meanings.setdefault(meaning, []).append(f"`{algorithm.name}`")
    for (name, values, help), owners in sorted(meanings.items()):
        lines.append(f"| `{name}` | {', '.join(owners)} | {values} | {help} |")
    return "\n".join(lines)


def _meaning(option: Option) -> str:
    if option.only_with is None:
        return option.help
    name, words = option.only_with
    return f"{option.help}; only with `{name}` {' or '.join(words)}"


def _shown(option: Option) -> str:
    match option.default:
        case None:
            default = f"({option.unset})"
        case bool():
            default = str(option.default).lower()
        case float():
            default = f"{option.default:g}"
        case _:
            default = str(option.default)
    return f"`{option.name}` {default}"


def _values(option: Option) -> str:
    if option.type == "word":
        return ", ".join(option.words)
    if option.type == "flag":
        return "true, false"
    if option.high == value_checks.LARGEST_INTEGER:
        return f"{option.low:g} and above"
    return f"{option.low:g} to {option.high:g}"
