"""The noise levels of flow matching with Euler steps: `FlowMatchEulerDiscreteScheduler`.

A latent at noise level sigma is `(1 - sigma) * clean + sigma * noise`, and the transformer
predicts its velocity, `noise - clean`. N steps go from sigma 1 to 0:

    x <- x + (sigma[i + 1] - sigma[i]) * v(x, sigma[i])

A shift moves the levels towards 1, because larger images need more of their steps at high noise.
It is static, or dynamic: then it depends on the number of image tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from jdllm import errors

CLASS_NAME = "FlowMatchEulerDiscreteScheduler"
FILE_NAME = "scheduler_config.json"

TimeShift = Literal["exponential", "linear"]

# A shift above has all levels at 1, in float32.
_LARGEST = 1e6
_LARGEST_MU = 80.0  # of exponents of a dynamic shift, in float32

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "shift": (0, _LARGEST),
    "base_shift": (-_LARGEST, _LARGEST),
    "max_shift": (-_LARGEST, _LARGEST),
    "base_image_seq_len": (0, _LARGEST),
    "max_image_seq_len": (0, _LARGEST),
    "shift_terminal": (0, 1),
}
# Other ways to space the levels or to step, which no published text-to-image model uses.
_ONLY: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
    "invert_sigmas": False,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlowSchedule:
    """A schedule; the names and defaults of the fields are those of scheduler_config.json.

    `shift` counts without `use_dynamic_shifting`, the four bounds and `time_shift_type` with it.
    With `shift_terminal` the last level before 0 has this value.
    """

    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    time_shift_type: TimeShift = "exponential"
    shift_terminal: float | None = None

    def __post_init__(self) -> None:
        if not self.use_dynamic_shifting and not self.shift:
            raise errors.ConfigError(
                f"{FILE_NAME}: shift={self.shift} is not supported without use_dynamic_shifting; "
                f"supported: a positive number up to {_LARGEST:g}"
            )
        if self.max_image_seq_len == self.base_image_seq_len:
            raise errors.ConfigError(
                f"{FILE_NAME}: max_image_seq_len={self.max_image_seq_len} must differ from "
                "base_image_seq_len"
            )
        if self.shift_terminal is not None and self.shift_terminal >= 1:
            raise errors.ConfigError(
                f"{FILE_NAME}: shift_terminal={self.shift_terminal} must be less than 1"
            )

    def check_images(self, most_tokens: int) -> None:
        """Raises a ConfigError if no number holds the shift of an image of up to so many tokens."""
        if not self.use_dynamic_shifting:
            return
        low, high = self._mu_bounds()
        for tokens in (1, most_tokens):
            mu = self._mu(tokens)
            if not low < mu < high:
                raise errors.ConfigError(
                    f"{FILE_NAME}: base_shift={self.base_shift} at base_image_seq_len="
                    f"{self.base_image_seq_len} and max_shift={self.max_shift} at "
                    f"max_image_seq_len={self.max_image_seq_len} make a shift of {mu:.3g} for "
                    f"images of {tokens} tokens, which a request may ask for, but a "
                    f"time_shift_type of {self.time_shift_type} has shifts between {low:g} and "
                    f"{high:g} here{'; lower max_image_pixels' if tokens > 1 else ''}"
                )

    def sigmas(self, num_steps: int, image_tokens: int) -> Float32[np.ndarray, " num_steps+1"]:
        """Returns the noise level before each step and after the last one, which is 0.

        `image_tokens` is the number of patches of the latent, without padding.
        """
        if num_steps < 1:
            raise ValueError(f"{num_steps=} must be at least 1")
        levels = np.linspace(1, 1 / num_steps, num_steps).astype(np.float32)
        levels = self._shifted(levels, image_tokens)
        # One step has the level 1 alone, which nothing can stretch.
        if self.shift_terminal is not None and num_steps > 1:
            rest = 1 - levels
            levels = 1 - rest * ((1 - self.shift_terminal) / rest[-1])
        return np.append(levels, np.float32(0))

    def _shifted(self, levels: np.ndarray, image_tokens: int) -> np.ndarray:
        if not self.use_dynamic_shifting:
            return self.shift * levels / (1 + (self.shift - 1) * levels)
        mu = self._mu(image_tokens)
        strength = math.exp(mu) if self.time_shift_type == "exponential" else mu
        return strength / (strength + (1 / levels - 1))

    def _mu_bounds(self) -> tuple[float, float]:
        """Returns the shifts between which levels are numbers.

        A terminal level stretches the levels, which needs one that is less than 1.
        """
        if self.time_shift_type == "linear":
            return 0.0, _LARGEST
        has_terminal = self.shift_terminal is not None
        return -_LARGEST_MU, math.log(_LARGEST) if has_terminal else _LARGEST_MU

    def _mu(self, image_tokens: int) -> float:
        """Returns the shift of an image: the line through both bounds, also outside them."""
        tokens = self.max_image_seq_len - self.base_image_seq_len
        slope = (self.max_shift - self.base_shift) / tokens
        return self.base_shift + slope * (image_tokens - self.base_image_seq_len)


@functools.lru_cache(maxsize=1024)
def sigmas_of(
    schedule: FlowSchedule, num_steps: int, image_tokens: int
) -> Float32[np.ndarray, " num_steps+1"]:
    """Returns `schedule.sigmas`, which every step of every row asks for; not to be written."""
    return schedule.sigmas(num_steps, image_tokens)


def read(values: Mapping[str, Any]) -> FlowSchedule:
    """Returns the schedule of a parsed scheduler_config.json.

    Raises a ConfigError that names the key for another class, for an option that is not
    implemented, for a wrong value and for an unknown key.
    """
    if values.get("_class_name") != CLASS_NAME:
        _refuse("_class_name", values.get("_class_name"), CLASS_NAME)
    for key, only in _ONLY.items():
        # null switches a flag off, as false does; of a number it means nothing.
        if key in values and values[key] not in ((None, False) if only is False else (only,)):
            _refuse(key, values[key], json.dumps(only))
    types = typing.get_type_hints(FlowSchedule)
    for key in values.keys() - types.keys() - _ONLY.keys():
        if not key.startswith("_") and values[key] is not None:
            raise errors.ConfigError(
                f"{FILE_NAME}: unknown key {key}={errors.quote(values[key])}"
                f"{errors.nearest(key, types.keys() | _ONLY.keys())}"
            )
    given = values.keys() & types.keys()
    if values.get("use_dynamic_shifting") and values.get("shift") is None:
        given -= {"shift"}  # which does not count then
    return FlowSchedule(**{key: _checked(key, values[key], types[key]) for key in given})


def _checked(key: str, value: Any, wanted: object) -> Any:
    """Returns the value of a field if it has the type that the field has; else it is refused.

    Of a number null is an error of diffusers, too.
    """
    if wanted is bool:
        if value not in (None, False, True):  # 0 and 1, too
            _refuse(key, value, "true or false")
        return bool(value)
    if wanted is TimeShift:
        if value not in typing.get_args(TimeShift):
            _refuse(key, value, " or ".join(typing.get_args(TimeShift)))
        return value
    if key == "shift_terminal" and not value:
        return None  # diffusers writes "no terminal level" as null and as 0
    low, high = _BOUNDS[key]
    is_number = isinstance(value, int if wanted is int else int | float)
    if isinstance(value, bool) or not is_number or not low <= value <= high:
        kind = "an integer" if wanted is int else "a number"
        _refuse(key, value, f"{kind} from {low:g} to {high:g}")
    return value


def _refuse(key: str, value: object, supported: object) -> typing.NoReturn:
    raise errors.ConfigError(
        f"{FILE_NAME}: {key}={errors.quote(value)} is not supported; supported: {supported}"
    )
