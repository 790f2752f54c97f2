"""`Engine.trace`: an answer and how it was denoised, for research and for notebooks."""

from __future__ import annotations

import dataclasses
import sys

from jdllm.engine import answer_steps, trace_view


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace(answer_steps.AnswerSteps):
    """An answer and its steps; as the last expression of a notebook's cell it is drawn."""

    def show(self) -> None:
        """Draws the trace: inline in a notebook, as text with colours in a terminal.

        Where standard output is no terminal, the text has no colours.
        """
        # A notebook has loaded IPython; nobody else needs it.
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if ipython is not None and shell is not None and hasattr(shell, "kernel"):
            ipython.display.display(self)
        else:
            sys.stdout.write(trace_view.terminal(self, has_colours=sys.stdout.isatty()))

    def _repr_html_(self) -> str:
        return trace_view.html(self)

    def __str__(self) -> str:
        return trace_view.terminal(self, has_colours=False)

    def __repr__(self) -> str:
        return f"<Trace: {len(self.output_ids)} tokens in {len(self.steps)} steps>"
