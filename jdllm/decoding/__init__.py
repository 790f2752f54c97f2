"""The algorithms one can name with `--dllm-algorithm`; options are in `sampling_params`.

`ALGORITHMS` write a block of a block-causal model, `CANVAS_ALGORITHMS` the whole canvas of a
full-attention one.
"""

from jdllm.decoding.block.interface import Algorithm
from jdllm.decoding.block.joint_threshold import JointThreshold
from jdllm.decoding.block.low_confidence import LowConfidence
from jdllm.decoding.canvas.dream import Dream
from jdllm.decoding.canvas.entropy_threshold import EntropyThreshold
from jdllm.decoding.canvas.fast_dllm import FastDLLM
from jdllm.decoding.canvas.full_attn_multi_block import FullAttnMultiBlock
from jdllm.decoding.canvas.interface import CanvasAlgorithm
from jdllm.decoding.canvas.llada import LLaDA

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
