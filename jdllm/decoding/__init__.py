"""The algorithms one can name with `--dllm-algorithm`; options are in `sampling_params`."""

from jdllm.decoding.interface import Algorithm
from jdllm.decoding.joint_threshold import JointThreshold
from jdllm.decoding.low_confidence import LowConfidence

ALGORITHMS: dict[str, Algorithm] = {
    "LowConfidence": LowConfidence(),
    "JointThreshold": JointThreshold(),
}
