"""Draws a trace: as HTML without scripts or files of other servers, and as text with colours.

Both show the answer, each position in the colour of the step that wrote it (early is blue, late is
red), and below it a line for each step, in which what the step decided stands out.
"""

from __future__ import annotations

import html as html_lib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jdllm.engine import answer_steps

MASK = "\N{MEDIUM SHADE}"
NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
MAX_LINES = 64  # of steps; more are thinned out evenly, the last one kept
RESET = "\x1b[0m"
NEW = "\x1b[1;7m"  # bold, in reverse
# Colours of the terminal's cube of 6 x 6 x 6, from blue over violet to red.
RAMP = (27, 33, 63, 99, 135, 171, 170, 205, 204, 203, 196)
FIRST_HUE, LAST_HUE = 220, 360


def terminal(shown: answer_steps.AnswerSteps, *, has_colours: bool) -> str:
    """Returns some lines of text; `has_colours` uses ANSI's escape sequences."""
    last = len(shown.steps)
    cells = [
        _coloured(text, RAMP[round(_share(at, last) * (len(RAMP) - 1))] if at else None)
        if has_colours
        else _visible(text)
        for text, at in zip(shown.texts, shown.decided_at, strict=True)
    ]
    lines = [f"{_title(shown)}", "".join(cells), ""]
    for step, new in _lines(shown.steps):
        cells = [
            f"{NEW}{_visible(text)}{RESET}" if i in new and has_colours else _visible(text)
            for i, text in _cells(step)
        ]
        lines.append(f"{step.number:>{len(str(last))}} {'+' + str(len(new)):>4}  {''.join(cells)}")
    return "\n".join(lines) + "\n"


def html(shown: answer_steps.AnswerSteps) -> str:
    """Returns one element; positions tell their step and their confidence when pointed at."""
    last = len(shown.steps)
    cells = [
        f'<span style="background:{_hue(at, last)}" title="{_tooltip(at, confidence)}">'
        f"{_escaped(text)}</span>"
        for text, at, confidence in zip(
            shown.texts, shown.decided_at, shown.confidences, strict=True
        )
    ]
    rows = [
        f'<tr><td style="text-align:right">{step.number}</td>'
        f'<td style="text-align:right">+{len(new)}</td>'
        f'<td style="text-align:left;white-space:pre-wrap">{_row(step, new, last)}</td></tr>'
        for step, new in _lines(shown.steps)
    ]
    return (
        '<div style="font-family:monospace;line-height:1.7">'
        f'<div style="opacity:.7">{html_lib.escape(_title(shown))}</div>'
        f'<div style="white-space:pre-wrap;color:#111">{"".join(cells)}</div>'
        f"<details><summary>step by step</summary><table>{''.join(rows)}</table></details></div>"
    )


def _title(shown: answer_steps.AnswerSteps) -> str:
    info = shown.meta_info["dllm"]
    skipped = sum(bool(step.decided) for step in shown.steps) - len(list(_lines(shown.steps)))
    return (
        f"{len(shown.output_ids)} tokens in {info['nfe']} forwards "
        f"({info['tpf']:.2f} tokens per forward), {info['algorithm']}"
        + (f"; lines of {skipped} steps are left out" if skipped else "")
    )


def _lines(steps: Sequence[answer_steps.Step]) -> Iterator[tuple[answer_steps.Step, set[int]]]:
    """Yields the steps that get a line, and the positions decided since the line before.

    Steps that wrote only behind the end of the output have none.
    """
    telling = [step for step in steps if step.decided]
    stride = -(-len(telling) // MAX_LINES)
    new: set[int] = set()
    for left, step in zip(range(len(telling) - 1, -1, -1), telling, strict=True):
        new |= {one.position for one in step.decided}
        if left % stride == 0:
            yield step, new
            new = set()


def _cells(step: answer_steps.Step) -> list[tuple[int, str]]:
    return [
        (i, MASK if token_id is None else text)
        for i, (token_id, text) in enumerate(zip(step.token_ids, step.texts, strict=True))
    ]


def _row(step: answer_steps.Step, new: set[int], last: int) -> str:
    mark = f'<b style="color:#111;background:{_hue(step.number, last)}">'
    return "".join(
        f"{mark}{_escaped(text)}</b>" if i in new else _escaped(text) for i, text in _cells(step)
    )


def _share(at: int, last: int) -> float:
    return (at - 1) / max(last - 1, 1)


def _hue(at: int, last: int) -> str:
    """Returns the colour of a step; tokens that were given (step 0) are gray."""
    if at == 0:
        return "#ddd"
    return f"hsl({round(FIRST_HUE + _share(at, last) * (LAST_HUE - FIRST_HUE))},90%,82%)"


def _tooltip(at: int, confidence: float | None) -> str:
    if at == 0:
        return "given"
    return f"step {at}" + ("" if confidence is None else f", probability {confidence:.3f}")


def _coloured(text: str, colour: int | None) -> str:
    return _visible(text) if colour is None else f"\x1b[38;5;{colour}m{_visible(text)}{RESET}"


def _visible(text: str) -> str:
    """Returns text of one line; other characters that move the cursor become dots."""
    marked = text.replace("\n", NEWLINE)
    return "".join(one if one.isprintable() else "\N{MIDDLE DOT}" for one in marked)


def _escaped(text: str) -> str:
    return html_lib.escape(_visible(text))
