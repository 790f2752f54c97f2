"""The algorithms one can name with `--dllm-algorithm`; options are in `sampling_params`.

`ALGORITHMS` write a block of a block-causal model, `CANVAS_ALGORITHMS` the whole canvas of a
full-attention one.
"""

from jdllm.decoding.canvas import CanvasAlgorithm
from jdllm.decoding.dream import Dream
from jdllm.decoding.entropy_threshold import EntropyThreshold
from jdllm.decoding.fast_dllm import FastDLLM
from jdllm.decoding.full_attn_multi_block import FullAttnMultiBlock
from jdllm.decoding.interface import Algorithm
from jdllm.decoding.joint_threshold import JointThreshold
from jdllm.decoding.llada import LLaDA
from jdllm.decoding.low_confidence import LowConfidence

ALGORITHMS: dict[str, Algorithm] = {
    "LowConfidence": LowConfidence(),
    "JointThreshold": JointThreshold(),
}
CANVAS_ALGORITHMS: dict[str, CanvasAlgorithm] = {
    "FullAttnMultiBlock": FullAttnMultiBlock(),
    "EntropyThreshold": EntropyThreshold(),
    "LLaDA": LLaDA(),
    "Dream": Dream(),
    "FastDLLM": FastDLLM(),
}
# What families with shifted logits (Dream) have instead.
SHIFTED_ALGORITHMS: dict[str, CanvasAlgorithm] = {
    "FullAttnMultiBlock": FullAttnMultiBlock(is_shifted=True),
}


def canvas_algorithm(name: str, *, is_shifted: bool) -> CanvasAlgorithm:
    """Returns the algorithm of that name in the variant of the family."""
    variants = CANVAS_ALGORITHMS | SHIFTED_ALGORITHMS if is_shifted else CANVAS_ALGORITHMS
    return variants[name]
