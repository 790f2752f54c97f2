"""AdamW, and Muon for the matrices of blocks, without the learning rate, which steps apply.

Muon moves a matrix by the orthogonal factor of its momentum. Scaled by 0.2 sqrt(longer side), the
root mean square of its entries is about that of AdamW's, so that learning rate and decay are the
same for both (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982).

A state's weights are one dict by path. Small models have many matrices of few shapes; those of one
shape are orthogonalised in one batched product each.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping
from typing import Protocol, cast

import jax.numpy as jnp
import optax
from optax import contrib

Arrays = Mapping[str, "jnp.ndarray"]

NAMES = ("adamw", "muon")
_ADAM_B1 = 0.9
_MUON_RMS = 0.2
# The matrices of attention and feed-forward, [out, in] or [experts, out, in].
_MATRICES = (".w_qkv", ".w_out", ".w_gate_up", ".w_down")


class Options(Protocol):
    """What the config of a run says of its optimiser."""

    @property
    def optimizer(self) -> str: ...
    @property
    def adam_b2(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip_norm(self) -> float: ...


def build(options: Options) -> optax.GradientTransformation:
    """Returns the optimiser of flat dicts; matrices decay, vectors and numbers do not."""
    adam = optax.scale_by_adam(b1=_ADAM_B1, b2=options.adam_b2)
    if options.optimizer == "muon":
        kinds: dict[Hashable, optax.GradientTransformation]
        kinds = {"matrix": _by_shape(), "other": adam}
        chosen = optax.partition(kinds, _kinds)
    else:
        chosen = adam
    decay = optax.add_decayed_weights(options.weight_decay, mask=_decays)
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), chosen, decay)


def _decays(params: optax.Params) -> dict[str, bool]:
    return {path: array.ndim > 1 for path, array in _dict(params).items()}


def _kinds(params: optax.Params) -> dict[str, str]:
    return {
        path: "matrix" if path.endswith(_MATRICES) and array.ndim > 1 else "other"
        for path, array in _dict(params).items()
    }


def _dimensions(stacks: optax.Params) -> dict[str, contrib.MuonDimensionNumbers]:
    return {
        name: contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
        for name in _dict(stacks)
    }


def _by_shape() -> optax.GradientTransformation:
    """Returns Muon on stacks [count, out, in] of the matrices of each shape."""
    muon = contrib.scale_by_muon(weight_dimension_numbers=_dimensions)

    def init(params: optax.Params) -> optax.OptState:
        return muon.init(_stacked(_dict(params)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[dict[str, jnp.ndarray], optax.OptState]:
        del params
        stacks, state = muon.update(_stacked(_dict(updates)), state)
        scaled = {
            name: stack * (_MUON_RMS * max(stack.shape[1:]) ** 0.5)
            for name, stack in _dict(stacks).items()
        }
        return _unstacked(scaled, _dict(updates)), state

    return optax.GradientTransformation(init, update)


def _dict(tree: optax.Params) -> Arrays:
    """Returns the tree as what it is here: arrays by path."""
    return cast("Arrays", tree)


def _groups(arrays: Arrays) -> dict[str, list[str]]:
    groups = collections.defaultdict(list)
    for path in sorted(path for path, array in arrays.items() if hasattr(array, "shape")):
        out, in_ = arrays[path].shape[-2:]
        groups[f"{out}x{in_}"].append(path)
    return groups


def _stacked(arrays: Arrays) -> dict[str, jnp.ndarray]:
    return {
        name: jnp.concatenate([arrays[p].reshape(-1, *arrays[p].shape[-2:]) for p in paths])
        for name, paths in _groups(arrays).items()
    }


def _unstacked(stacks: Arrays, like: Arrays) -> dict[str, jnp.ndarray]:
    found = dict(like)
    for name, paths in _groups(like).items():
        start = 0
        for path in paths:
            count = like[path].size // stacks[name][0].size
            found[path] = stacks[name][start : start + count].reshape(like[path].shape)
            start += count
    return found
