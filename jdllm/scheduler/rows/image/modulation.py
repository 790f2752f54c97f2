"""When the modulation of image rows is made: what is planned of it, and for whom together.

Where a pipeline has it made before the steps (`image_buckets.Windows`), a slot holds that of a
window of steps. A row whose next step lies behind its window is due. The launch that makes the next
window of it reads all weights that make modulation, and for one row as much of them as for many. So
the others come along that have left a step of their window behind, those first that are due next:
however rows stand to each other, there is about one such launch for the steps of a window, and one
for each image that begins.

A row that is due has no step, so at most one launch delays the others, as outputs and captions do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jdllm.scheduler.batch import ScheduleBatch
from jdllm.scheduler.request import Request
from jdllm.scheduler.rows.image import buckets
from jdllm.scheduler.rows.image.captions import CaptionStore
from jdllm.scheduler.rows.image.programs import Programs
from jdllm.scheduler.rows.image.row_limits import RowLimits
from jdllm.scheduler.rows.image.stay import image_of, stay_of


class Modulation:
    """Plans the windows of running rows; `windows` is None where steps make all modulation."""

    def __init__(
        self,
        windows: buckets.Windows | None,
        captions: CaptionStore,
        programs: Programs,
        row_limits: RowLimits,
    ):
        self._windows = windows
        self._captions = captions
        self._programs = programs
        self._row_limits = row_limits

    def is_there(self, request: Request) -> bool:
        """Returns whether that of the next step has been planned."""
        return self._windows is None or self._num_left(request, self._windows) > 0

    def place(self, request: Request) -> int:
        """Returns where that of the next step stands in the window."""
        stay = stay_of(request)
        return 0 if stay.window is None else stay.num_planned - stay.window

    def plan(self, running: Sequence[Request]) -> ScheduleBatch | None:
        """Returns a launch for the rows that are due, and others; None if no row is."""
        windows = self._windows
        if windows is None:
            return None
        due = [one for one in running if self._is_due(one, windows)]
        if not due:
            return None
        shape = _shape(due[0], windows)
        others = [one for one in running if self._gains(one, windows)]
        others.sort(key=lambda one: self._num_left(one, windows))
        members = [one for one in (*due, *others) if _shape(one, windows) == shape]
        sizes = self._row_limits.allowed(shape, windows.rows)
        bucket = self._programs.first(
            dataclasses.replace(shape, rows=size) for size in buckets.by_room(sizes, len(members))
        )
        rows = []
        for one in members[: bucket.rows]:
            stay = stay_of(one)
            stay.window = stay.num_planned
            rows.append(
                buckets.ModulateRow(
                    request=one, stay=stay, step=stay.window, is_fresh=stay.is_fresh
                )
            )
        return ScheduleBatch(rows=tuple(rows), bucket=bucket)

    def _num_left(self, request: Request, windows: buckets.Windows) -> int:
        """Returns how many steps of the window have not been planned."""
        stay = stay_of(request)
        return 0 if stay.window is None else stay.window + windows.steps - stay.num_planned

    def _is_due(self, request: Request, windows: buckets.Windows) -> bool:
        stay = stay_of(request)
        return (
            stay.num_planned < image_of(request).num_inference_steps
            and not self._num_left(request, windows)
            and all(map(self._captions.is_written, stay.entries))
            and self._programs.has(_shape(request, windows))
        )

    def _gains(self, request: Request, windows: buckets.Windows) -> bool:
        """Returns whether a row that is not due has more steps in a window that begins now."""
        stay, steps = stay_of(request), image_of(request).num_inference_steps
        left = self._num_left(request, windows)
        return 0 < left < windows.steps and stay.num_planned + left < steps


def _shape(request: Request, windows: buckets.Windows) -> buckets.ModulateBucket:
    """Returns the bucket of one row that a request needs."""
    return windows.bucket(is_guided=image_of(request).is_guided)
