"""A block launch streams the vocabulary for open positions only."""

import jax
import numpy as np
import pytest
from support.tiny_engine import BLOCK, make_engine

from jdllm.runner.block import proposal

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile


def test_only_positions_that_can_change_reach_the_vocabulary(monkeypatch):
    wanted, real = [], proposal._statistics

    def spy(unembed_stats, hidden, given_ids, rows):
        jax.debug.callback(lambda count: wanted.append(int(count)), rows.sum(), ordered=True)
        return real(unembed_stats, hidden, given_ids, rows)

    monkeypatch.setattr(proposal, "_statistics", spy)
    with make_engine(max_running_requests=1, disable_fused_commit=True) as engine:
        params = {"max_new_tokens": 3 * BLOCK - 2, "ignore_eos": True, "dllm": {"threshold": 0.0}}
        prompt = np.arange(10, 12).tolist()  # two positions of the first block are the prompt's
        engine.generate(input_ids=prompt, sampling_params=params)
    jax.effects_barrier()
    # A step writes a whole block, the next one only persists it; the last block ends the request.
    assert wanted == [BLOCK - 2, 0, BLOCK, 0, BLOCK]
