"""Tables of the documentation, made from what the code declares."""

from __future__ import annotations

from collections.abc import Mapping

from jdllm import value_checks
from jdllm.algorithms.lookup import of_kind
from jdllm.algorithms.options import Option
from jdllm.foreign import flags


def algorithms(kind: str) -> str:
    """Returns the algorithms of a kind with their options and defaults, as a table."""
    lines = ["| algorithm | writes | options and their defaults |", "|---|---|---|"]
    for number, algorithm in enumerate(of_kind(kind).values()):
        name = f"`{algorithm.name}`" + (" (the default)" if number == 0 else "")
        options = ", ".join(_shown(option) for option in algorithm.options)
        if algorithm.alternatives:
            options += f"; a request gives at most one of {', '.join(algorithm.alternatives)}"
        lines.append(f"| {name} | {algorithm.writes} | {options} |")
    return "\n".join(lines)


def algorithm_options(kind: str) -> str:
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


def foreign_flags() -> str:
    """Returns the table of `docs/flags.md`: accepted flags and what happens instead."""
    lines = ["| accepted, without effect | what happens instead |", "|---|---|"]
    for group in flags.SPEED:
        names = ", ".join(f"`{flags.spelled(name)}`" for name, _ in group.flags())
        lines.append(f"| {names} | {group.instead} |")
    return "\n".join(lines)


def flag_aliases(also: Mapping[str, str]) -> str:
    """Returns the table of `docs/flags.md` that shows other names of options."""
    lines = ["| also | option |", "|---|---|"]
    opposites = {f"no_{name}": of for name, of in flags.OPPOSITES.items()}
    for name, of in {**flags.ALIASES, **also, **opposites}.items():
        lines.append(f"| `{flags.spelled(name)}` | `{flags.spelled(of)}` |")
    return "\n".join(lines)


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
