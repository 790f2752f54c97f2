"""A component of an image pipeline: text encoder, transformer or autoencoder.

A component is one file: a config, an NNX module, and a weight table as text:

    layers.{i}.attention.to_q.weight      layers.{i}.attention.w_qkv[0/3]
    layers.{i}.self_attn.k_proj.weight    layers.{i}.attention.w_qkv[4:6/8]
    decoder.conv_in.weight                decoder.conv_in.kernel[conv]
    decoder.conv_out.weight               decoder.conv_out.kernel[conv@2/3]
    norm_out.gamma                        norm_out.weight[1x1]

Left is the tensor of a checkpoint, right the path of a parameter and the part of it that the
tensor fills. `{i}`, `{j}` and `{k}` stand for the numbers in a path. `[0/3]` is the first of three
equal parts of the first axis, `[4:6/8]` are parts 4 and 5 of eight; `[conv]` turns a convolution's
[out, in, height, width] into the parameter's [height, width, in, out]. `[conv@2/3]` does so with
tap 2 of a kernel that has 3 taps over time, [out, in, time, height, width]; the other taps are not
read. With `[1x1]` the tensor has two more axes than the parameter, of size 1. Linear weights are
[out, in] on both sides. `to_q.weight|query.weight` is a tensor with two names: either is read, and
the first is written.

A second text names the parameters that `--quantization` turns into 8-bit floats.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdllm.checkpoint import weight_table
from jdllm.models.images.quantization import replace_weights
from jdllm.options.config import Quantization

Config = TypeVar("Config")
Shapes = Mapping[str, jax.ShapeDtypeStruct]

_ROW = re.compile(r"(\S+)\s+([^\s\[\]]+)(?:\[([^\s\[\]]+)\])?")
_TAP = re.compile(r"conv@(\d+)/(\d+)")
_ONES = re.compile(r"1(?:x1)*")
_SHARE = re.compile(r"(\d+)(?::(\d+))?/(\d+)")
_PLACEHOLDER = re.compile(r"\\\{([ijk])\\\}")


def _uses_all(_config: Any, _name: str) -> bool:
    return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Component(Generic[Config]):
    """One class of `model_index.json`; the declaration checks that its table is complete.

    `read` turns the component's config.json into a config and raises a ConfigError that names
    a key it cannot serve. `build` makes the module, `weights` gives the table's text.
    `file_class_names`: other classes that config.json may name, whose files hold this model, too.
    `is_unused` tells which tensors of a checkpoint no forward pass reads. Tensors of a checkpoint
    may have names that begin with `optional_prefix`; the table and `is_unused` leave it out.
    `example` is the config.json of a tiny model with every parameter that the class may have.
    `fp8_weights` has a line for each kind of weight that is quantised if fp8 is asked for: those of
    the large products that each step computes for every token. All else keeps its dtype.
    """

    class_names: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Config]
    build: Callable[[Config, jnp.dtype], nnx.Module]
    weights: Callable[[Config], str]
    example: Mapping[str, Any]
    is_unused: Callable[[Config, str], bool] = _uses_all
    file_class_names: tuple[str, ...] = ()
    optional_prefix: str = ""
    fp8_weights: str = ""

    def __post_init__(self) -> None:
        config = self.read(self.example)
        shapes = self.abstract(config, jnp.dtype(jnp.float32))[1]
        _check(self.weights(config), shapes)
        for line in _lines(self.fp8_weights):
            if not any(_pattern(line).fullmatch(path) for path in shapes):
                raise ValueError(f"{line!r}: no parameter has this name")

    def abstract(
        self,
        config: Config,
        dtype: jnp.dtype,
        *,
        quantization: Quantization | None = None,
    ) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
        """Returns (graphdef, shape and dtype of every parameter) without allocating memory.

        A weight that is quantised is two parameters, see `fp8_weight`.
        """
        patterns = [_pattern(line) for line in _lines(self.fp8_weights) if quantization == "fp8"]

        def build() -> nnx.Module:
            module = self.build(config, dtype)
            replace_weights(
                module, lambda path: any(pattern.fullmatch(path) for pattern in patterns)
            )
            return module

        graphdef, state = nnx.split(nnx.eval_shape(build))
        return graphdef, {
            ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in nnx.to_flat_state(state)
        }

    def weight_rows(self, config: Config) -> tuple[weight_table.WeightRow, ...]:
        """Returns a row for every tensor that a checkpoint of this model holds for use."""
        shapes = self.abstract(config, jnp.dtype(jnp.float32))[1]
        return tuple(row for line in _lines(self.weights(config)) for row in _expand(line, shapes))

    def match(
        self,
        config: Config,
        shapes: Mapping[str, tuple[int, ...]],
        unread_dtypes: Mapping[str, str] = types.MappingProxyType({}),
    ) -> dict[str, list[weight_table.Fill]]:
        """Returns which tensors of a checkpoint fill each parameter; see `weight_table.match`.

        Raises a ConfigError with every tensor that does not fit.
        """
        return weight_table.match(
            self.weight_rows(config),
            shapes,
            optional_prefix=self.optional_prefix,
            is_unused=functools.partial(self.is_unused, config),
            unread_dtypes=unread_dtypes,
        )


def _pattern(parameter: str) -> re.Pattern[str]:
    """Returns what matches the paths of a parameter with placeholders."""
    return re.compile(_PLACEHOLDER.sub(r"(?P<\1>\\d+)", re.escape(parameter)))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _expand(line: str, shapes: Shapes) -> Iterator[weight_table.WeightRow]:
    """Yields a row for each parameter that a line names."""
    found = _ROW.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is no row of a weight table: tensor, parameter[part]")
    tensor, parameter, part = found.groups(default="")
    pattern = _pattern(parameter)
    view, tap = _view(part), _tap(part)
    for path, whole in shapes.items():
        if match := pattern.fullmatch(path):
            shape = view(np.broadcast_to(np.int8(0), whole.shape)).shape
            name, *other_names = tensor.format(**match.groupdict()).split("|")
            yield weight_table.WeightRow(
                name=name,
                other_names=tuple(other_names),
                shape=shape if tap is None else (*shape[:2], tap[1], *shape[2:]),
                target=path,
                view=view,
                cut=None if tap is None else functools.partial(_time, tap[0]),
            )


def _view(part: str) -> Callable[[np.ndarray], np.ndarray]:
    if not part:
        return weight_table.whole
    if part == "conv" or _TAP.fullmatch(part):
        return _conv
    if _ONES.fullmatch(part):
        return functools.partial(_with_ones, part.count("1"))
    if (match := _SHARE.fullmatch(part)) is None:
        raise ValueError(f"[{part}] is no part of a parameter: conv, conv@2/3, 1x1, 0/3 or 0:2/3")
    begin, end, count = int(match[1]), int(match[2] or int(match[1]) + 1), int(match[3])
    return functools.partial(_share, begin, end, count)


def _tap(part: str) -> tuple[int, int] | None:
    """Returns (tap, number of taps) of a part that is one tap over time."""
    match = _TAP.fullmatch(part)
    if match is None:
        return None
    tap, count = int(match[1]), int(match[2])
    if tap >= count:
        raise ValueError(f"[{part}]: taps count from 0 to {count - 1}")
    return tap, count


def _time(tap: int, tensor: np.ndarray) -> np.ndarray:
    return tensor[:, :, tap]


def _with_ones(count: int, array: np.ndarray) -> np.ndarray:
    return np.expand_dims(array, tuple(range(array.ndim, array.ndim + count)))


def _conv(array: np.ndarray) -> np.ndarray:
    return array.transpose(3, 2, 0, 1)


def _share(begin: int, end: int, count: int, array: np.ndarray) -> np.ndarray:
    if len(array) % count:
        raise ValueError(f"an axis of {len(array)} has no {count} equal parts")
    size = len(array) // count
    return array[begin * size : end * size]


def _check(text: str, shapes: Shapes) -> None:
    """Raises unless each line names a parameter, and the lines fill each exactly once."""
    filled = {path: np.zeros(shape.shape, np.int8) for path, shape in shapes.items()}
    for line in _lines(text):
        rows = list(_expand(line, shapes))
        if not rows:
            raise ValueError(f"{line!r}: no parameter has this name")
        for row in rows:
            row.view(filled[row.target])[...] += 1
    for path, count in filled.items():
        if (count != 1).any():
            raise ValueError(f"the rows do not fill every part of {path} once")
