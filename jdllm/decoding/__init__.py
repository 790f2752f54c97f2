"""The rules of the algorithms that `algorithms.TABLE` declares, one dict for each kind of rows.

`BLOCK_ALGORITHMS` write a block of a block-causal model. `CANVAS_ALGORITHMS` write the whole
canvas of a full-attention model. `UNIFORM_ALGORITHMS` denoise canvases of random tokens. The import
fails if a declared algorithm has no rule, or if a rule is not declared.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import cast

from jdllm.algorithms import lookup
from jdllm.decoding.block.hierarchy_block import HierarchyBlock
from jdllm.decoding.block.interface import Algorithm
from jdllm.decoding.block.joint_threshold import JointThreshold
from jdllm.decoding.block.joint_threshold_indel import JointThresholdInDel
from jdllm.decoding.block.linear_spec import Autoregressive, LinearSpec
from jdllm.decoding.block.low_confidence import LowConfidence
from jdllm.decoding.block.masked_diffusion import MaskedDiffusion
from jdllm.decoding.block.sdar import SDAR
from jdllm.decoding.canvas.dream import Dream
from jdllm.decoding.canvas.entropy_threshold import EntropyThreshold
from jdllm.decoding.canvas.fast_dllm import FastDLLM
from jdllm.decoding.canvas.fill import CanvasRule
from jdllm.decoding.canvas.full_attn_multi_block import FullAttnMultiBlock
from jdllm.decoding.canvas.interface import CanvasAlgorithm
from jdllm.decoding.canvas.llada import LLaDA
from jdllm.decoding.uniform.gemma4_renoise import Gemma4Renoise
from jdllm.decoding.uniform.interface import UniformAlgorithm


@dataclasses.dataclass(frozen=True, slots=True)
class Variants:
    """A rule, and the rule for families with shifted logits (Dream) if that one differs."""

    plain: CanvasAlgorithm
    shifted: CanvasAlgorithm | None = None


BLOCK_ALGORITHMS: dict[str, Algorithm] = {
    "LowConfidence": LowConfidence(),
    "JointThreshold": JointThreshold(),
    "JointThresholdInDel": JointThresholdInDel(),
    "SDAR": SDAR(),
    "MaskedDiffusion": MaskedDiffusion(),
    "HierarchyBlock": HierarchyBlock(),
    "Autoregressive": Autoregressive(),
    "LinearSpec": LinearSpec(),
}
CANVAS_ALGORITHMS: dict[str, Variants] = {
    "FullAttnMultiBlock": Variants(FullAttnMultiBlock(), FullAttnMultiBlock(is_shifted=True)),
    "EntropyThreshold": Variants(EntropyThreshold()),
    "LLaDA": Variants(LLaDA()),
    "Dream": Variants(Dream()),
    "FastDLLM": Variants(FastDLLM()),
}
UNIFORM_ALGORITHMS: dict[str, UniformAlgorithm] = {"Gemma4Renoise": Gemma4Renoise()}


def canvas_algorithm(name: str, *, is_shifted: bool) -> CanvasAlgorithm:
    """Returns the algorithm of that name, in the variant for the family's logits."""
    variants = CANVAS_ALGORITHMS[name]
    return (is_shifted and variants.shifted) or variants.plain


def check_names(kind: str, rules: Collection[str]) -> None:
    """Raises an ImportError unless the rules are exactly the kind's declared algorithms."""
    declared = lookup.of_kind(kind)
    if unpaired := sorted(declared.keys() ^ set(rules)):
        raise ImportError(
            f"algorithms for {kind} rows without a rule, or rules that are not declared: "
            f"{', '.join(unpaired)}; see jdllm/algorithms/lookup.py and jdllm/decoding/__init__.py"
        )


DEFAULT_BLOCK_LENGTH = 32  # of a registered `CanvasRule`
_registered: set[str] = set()  # names of `register`


def register(
    name: str,
    rule: Algorithm | CanvasAlgorithm,
    *,
    options: Mapping[str, lookup.Value] | None = None,
    writes: str = "as its author says",
) -> None:
    """Adds an algorithm of the caller's own, for engines that are made afterwards.

    `rule` is a `BlockRule`, a `CanvasRule`, or anything with the methods of `Algorithm` or
    `CanvasAlgorithm`; its structure is part of the compiled step, so it must be hashable and never
    change. `options` are the options that requests may set and their defaults: names of options
    that algorithms of the same kind have, which the rule reads from `params` (a `CanvasRule` always
    has `block_length`). The same name may be registered again, and then means the new rule; a name
    of ours may not. Raises ValueError.
    """
    kind = _kind_of(rule)
    if not name.isidentifier():
        raise ValueError(f"{name=} must be an identifier")
    if name in lookup.TABLE and name not in _registered:
        raise ValueError(f"{name=} is an algorithm of jdllm; choose another name")
    hash(rule)
    defaults = dict(options or {})
    if isinstance(rule, CanvasRule):
        defaults.setdefault("block_length", DEFAULT_BLOCK_LENGTH)
    known = lookup.arrays_of(kind)
    declared = []
    for option, default in defaults.items():
        if option not in known:
            raise ValueError(
                f"{option=} is no option of algorithms for {kind} rows: {', '.join(known)}"
            )
        checked = known[option].checked(default)
        declared.append(dataclasses.replace(known[option], default=checked))
    if name in _registered:
        unregister(name)
    lookup.TABLE[name] = lookup.Algorithm(
        name=name, kind=kind, writes=writes, options=tuple(declared)
    )
    _registered.add(name)
    if kind == lookup.BLOCK:
        BLOCK_ALGORITHMS[name] = cast("Algorithm", rule)
    else:
        CANVAS_ALGORITHMS[name] = Variants(cast("CanvasAlgorithm", rule))


def unregister(name: str) -> None:
    """Forgets an algorithm that `register` added; engines that have it must be shut down first."""
    _registered.remove(name)
    del lookup.TABLE[name]
    BLOCK_ALGORITHMS.pop(name, None)
    CANVAS_ALGORITHMS.pop(name, None)


def _kind_of(rule: object) -> str:
    if not isinstance(rule, type):  # a class has the methods, too
        if isinstance(rule, CanvasAlgorithm):
            return lookup.CANVAS
        if isinstance(rule, Algorithm):
            return lookup.BLOCK
    raise ValueError(
        f"{rule!r} is no rule: derive it from jdllm.BlockRule or jdllm.CanvasRule, and give an "
        "instance, not the class"
    )


check_names(lookup.BLOCK, BLOCK_ALGORITHMS)
check_names(lookup.CANVAS, CANVAS_ALGORITHMS)
check_names(lookup.UNIFORM, UNIFORM_ALGORITHMS)
