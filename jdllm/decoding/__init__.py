"""The rules of the algorithms that `algorithms.TABLE` declares, one dict for each kind of rows.

`BLOCK_ALGORITHMS` write a block of a block-causal model. `CANVAS_ALGORITHMS` write the whole
canvas of a full-attention model. The import fails if a declared algorithm has no rule, or if a
rule is not declared.
"""

import dataclasses
from collections.abc import Collection

from jdllm import algorithms
from jdllm.decoding.block.interface import Algorithm
from jdllm.decoding.block.joint_threshold import JointThreshold
from jdllm.decoding.block.low_confidence import LowConfidence
from jdllm.decoding.canvas.dream import Dream
from jdllm.decoding.canvas.entropy_threshold import EntropyThreshold
from jdllm.decoding.canvas.fast_dllm import FastDLLM
from jdllm.decoding.canvas.full_attn_multi_block import FullAttnMultiBlock
from jdllm.decoding.canvas.interface import CanvasAlgorithm
from jdllm.decoding.canvas.llada import LLaDA


@dataclasses.dataclass(frozen=True, slots=True)
class Variants:
    """A rule, and the rule for families with shifted logits (Dream) if that one differs."""

    plain: CanvasAlgorithm
    shifted: CanvasAlgorithm | None = None


BLOCK_ALGORITHMS: dict[str, Algorithm] = {
    "LowConfidence": LowConfidence(),
    "JointThreshold": JointThreshold(),
}
CANVAS_ALGORITHMS: dict[str, Variants] = {
    "FullAttnMultiBlock": Variants(FullAttnMultiBlock(), FullAttnMultiBlock(is_shifted=True)),
    "EntropyThreshold": Variants(EntropyThreshold()),
    "LLaDA": Variants(LLaDA()),
    "Dream": Variants(Dream()),
    "FastDLLM": Variants(FastDLLM()),
}


def canvas_algorithm(name: str, *, is_shifted: bool) -> CanvasAlgorithm:
    """Returns the algorithm of that name, in the variant for the family's logits."""
    variants = CANVAS_ALGORITHMS[name]
    return (is_shifted and variants.shifted) or variants.plain


def check_names(kind: str, rules: Collection[str]) -> None:
    """Raises an ImportError unless the rules are exactly the kind's declared algorithms."""
    declared = algorithms.of_kind(kind)
    if unpaired := sorted(declared.keys() ^ set(rules)):
        raise ImportError(
            f"algorithms for {kind} rows without a rule, or rules that are not declared: "
            f"{', '.join(unpaired)}; see jdllm/algorithms.py and jdllm/decoding/__init__.py"
        )


check_names(algorithms.BLOCK, BLOCK_ALGORITHMS)
check_names(algorithms.CANVAS, CANVAS_ALGORITHMS)
