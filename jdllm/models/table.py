"""Weight tables as text: which checkpoint tensor fills which part of which parameter.

    model.embed_tokens.weight                      word_embeddings
    {layer}.self_attn.q_proj.weight                {layer}.attention.w_qkv[q]
    {layer}.mlp.experts.{expert}.down_proj.weight  {layer}.mlp.experts.w_down[{expert}]

`{layer}` is the path of each layer, `{number}` its number, for tensors that lie elsewhere, and
`{expert}` the number of each expert. The brackets name the
part of the parameter that the tensor fills, one of `PARTS`. A row counts only if the model has its
parameter, so a table needs no condition for a tied head, or for a bias or a router that a model
lacks. Shapes follow from the parameters. `WeightTable.check` finds parameters that a table forgets
or fills twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

import pallas_kernels
from jdllm.checkpoint import weight_table
from jdllm.layers import attention
from jdllm.models import decoder_config

Shapes = Mapping[str, jax.ShapeDtypeStruct]

_ROW = re.compile(r"(\S+)\s+([^\s\[\]]+)(?:\[([^\s\[\]]+)\])?")


def _whole(array: np.ndarray, _: attention.AttentionConfig) -> np.ndarray:
    return array


def _gate_up(array: np.ndarray) -> np.ndarray:
    # [..., 2F, D] -> [..., groups, gate or up, rows of a group, D], a view without a copy. It is
    # the layout of `pallas_kernels.grouped_matmul`.
    width = array.shape[-2] // 2
    group = pallas_kernels.gate_up_group(width)
    return array.reshape(*array.shape[:-2], width // group, 2, group, array.shape[-1])


def _heads(
    array: np.ndarray, config: attention.AttentionConfig, first: int, count: int
) -> np.ndarray:
    return array[first * config.head_dim : (first + count) * config.head_dim]


# Returns the view of a part of a parameter; the layer's attention config has the number of heads.
Part = Callable[[np.ndarray, attention.AttentionConfig], np.ndarray]
PARTS: dict[str, Part] = {
    # A router's weight [in, out], which checkpoints hold as [out, in].
    "transposed": lambda array, _: array.T,
    # The parameter holds q, then k, then v.
    "q": lambda array, config: _heads(array, config, 0, config.num_query_heads),
    "k": lambda array, config: _heads(array, config, config.num_query_heads, config.num_kv_heads),
    "v": lambda array, config: array[-config.num_kv_heads * config.head_dim :],
    # A dense feed-forward holds gate, then up.
    "gate": lambda array, _: array[: len(array) // 2],
    "up": lambda array, _: array[len(array) // 2 :],
    # Experts interleave groups of gate and up.
    "moe_gate": lambda array, _: _gate_up(array)[..., 0, :, :],
    "moe_up": lambda array, _: _gate_up(array)[..., 1, :, :],
    "moe_gate_up": lambda array, _: np.swapaxes(_gate_up(array), -4, -3),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One row of a table, with its placeholders."""

    tensor: str
    parameter: str
    part: str
    is_per_expert: bool
    form: str

    def expand(
        self, path: str, config: decoder_config.DecoderConfig, shapes: Shapes
    ) -> Iterator[weight_table.WeightRow]:
        """Yields a row per layer (and expert) with the parameter; `path` is the list of layers."""
        for i in range(len(config.layers)) if "{layer}" in self.parameter else (0,):
            target = self.parameter.replace("{layer}", f"layers.{i}")
            if target not in shapes:
                continue
            whole, heads = shapes[target].shape, config.layers[i].attention
            part = PARTS[self.part] if self.part else _whole
            shape = _shape_of(part, whole[1:] if self.is_per_expert else whole, heads)
            for expert in range(whole[0]) if self.is_per_expert else (None,):
                yield weight_table.WeightRow(
                    name=self.tensor.format(layer=f"{path}.{i}", number=i, expert=expert),
                    shape=shape,
                    target=target,
                    view=functools.partial(_view, part, heads, expert),
                    form=self.form,
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """A family's table; `layers` is the name of the list of layers in checkpoints.

    `forms` are named texts of rows that fill the same parameters. A checkpoint holds one of them;
    an export writes the first one. `unused` are the first parts of the names of tensors that a
    checkpoint may hold and that this engine has no use for (a vision tower).
    """

    layers: str
    rows: str
    forms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def expand(
        self, config: decoder_config.DecoderConfig, shapes: Shapes
    ) -> tuple[weight_table.WeightRow, ...]:
        """Returns a row per tensor of a model with these parameters (path -> shape)."""
        patterns = self._patterns()
        return tuple(row for one in patterns for row in one.expand(self.layers, config, shapes))

    def check(self, config: decoder_config.DecoderConfig, shapes: Shapes) -> None:
        """Raises unless each row names a parameter, and the rows fill each parameter exactly once.

        So the model must have every parameter that a model of the family may have.
        """
        filled: dict[str, dict[str, np.ndarray]] = {path: {} for path in shapes}
        for pattern in self._patterns():
            rows = list(pattern.expand(self.layers, config, shapes))
            if not rows:
                raise ValueError(f"{pattern.tensor}: no parameter is called {pattern.parameter}")
            for row in rows:
                forms = filled[row.target]
                count = forms.setdefault(row.form, np.zeros(shapes[row.target].shape, np.int8))
                row.view(count)[...] += 1
        for path, forms in filled.items():
            if not forms:
                raise ValueError(f"no row fills {path}")
            for form, count in forms.items():
                if (count != 1).any():
                    rows = f"the rows of form {form!r}" if form else "the rows"
                    raise ValueError(f"{rows} do not fill every part of {path} once")

    def _patterns(self) -> list[Pattern]:
        texts = {"": self.rows, **self.forms}
        return [
            _pattern(line.strip(), form)
            for form, text in texts.items()
            for line in text.splitlines()
            if line.strip()
        ]


def _pattern(line: str, form: str) -> Pattern:
    found = _ROW.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is no row of a weight table: tensor, parameter[part]")
    tensor, parameter, index = found.groups(default="")
    is_per_expert = index.startswith("{expert}")
    part = index.removeprefix("{expert}").removeprefix(",") if is_per_expert else index
    if part and part not in PARTS:
        raise ValueError(f"{line!r}: there is no part {part!r}; choose {', '.join(PARTS)}")
    is_of_a_layer = "{layer}" in tensor or "{number}" in tensor
    if ("{expert}" in tensor) != is_per_expert or is_of_a_layer != ("{layer}" in parameter):
        raise ValueError(f"{line!r} must have its placeholders on both sides")
    return Pattern(
        tensor=tensor, parameter=parameter, part=part, is_per_expert=is_per_expert, form=form
    )


def _view(
    part: Part, heads: attention.AttentionConfig, expert: int | None, array: np.ndarray
) -> np.ndarray:
    return part(array if expert is None else array[expert], heads)


def _shape_of(
    part: Part, whole: tuple[int, ...], heads: attention.AttentionConfig
) -> tuple[int, ...]:
    """Returns a tensor's shape: the shape of its part of the parameter, with groups joined."""
    shape = part(np.broadcast_to(np.int8(0), whole), heads).shape
    if len(shape) == len(whole):
        return shape
    lead = len(whole) - 2
    return (*shape[:lead], math.prod(shape[lead:-1]), shape[-1])
