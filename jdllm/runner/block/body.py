"""What the bodies of block loops share, whatever a step of them forwards. Letters: R rows."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool

from jdllm.models import decoder
from jdllm.runner.block.inputs import DenoiseInputs
from jdllm.runner.block.state import RowState, is_active
from jdllm.runner.config import StepConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockBody:
    """The rows of a launch as the loop (`launch/driver.py`) asks for them; `is_row`: no padding."""

    config: StepConfig
    model: decoder.Decoder
    inputs: DenoiseInputs
    is_row: Bool[Array, " R"]

    def is_finished(self, rows: RowState) -> Bool[Array, " R"]:
        return rows.is_finished & self.is_row

    def is_active(self, rows: RowState) -> Bool[Array, " R"]:
        return is_active(self.inputs, rows)

    def written(self, rows: RowState) -> Array:
        return rows.tokens
