"""What benchmarks count of experts, over ranks."""

import numpy as np
from support.golden_configs import GOLDENS
from support.on_mesh import load

from jdllm.runner import expert_use


def test_ranks_count_the_experts_of_the_whole_model():
    tokens = np.random.default_rng(5).integers(0, 300, 16).astype(np.int32)
    whole, parts = (load(GOLDENS / "llada2", tp)[0] for tp in (1, 2))
    assert expert_use.distinct_experts(parts, tokens) == expert_use.distinct_experts(whole, tokens)
