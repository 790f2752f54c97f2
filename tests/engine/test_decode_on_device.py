"""What a decode launch asks of the device: open positions at the head; one graph; few slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import BLOCK, make_engine

from jdllm.decoding.block import proposal
from jdllm.runner import model_runner, steps
from jdllm.runner.block import loop as decode_loop


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


@pytest.mark.parametrize("flags", [None, "--xla_dump_to=/tmp/x"])
def test_loops_are_captured_on_a_gpu(monkeypatch, flags):
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert model_runner._compiler_options() == {}  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (captured,) = model_runner._compiler_options().values()
    assert {"WHILE", "CONDITIONAL", "FUSION", "CUSTOM_CALL"} <= set(captured.split(","))


def test_what_xla_flags_say_of_captured_graphs_holds(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert model_runner._compiler_options() == {}


def test_this_xla_knows_the_option():
    options = {model_runner._GRAPH_OPTION: model_runner._CAPTURED}
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)


@pytest.mark.parametrize(("rows", "sizes"), [(4, (0, 4)), (16, (0, 4, 16)), (64, (0, 8, 64))])
def test_commit_slots_are_taken_where_they_save_more_than_they_cost(rows, sizes):
    config = steps.StepConfig(
        spec=None, page_size=64, num_pages=1, algorithms=("LowConfidence", "JointThreshold")
    )
    assert decode_loop.commit_slots(rows, config) == sizes
    tokens = rows * 32
    fixed = decode_loop.FORWARD_TOKENS
    for wanted in range(rows + 1):
        # Tokens' time for all rows: this step, and a forward for each row that got no slot.
        spent = [
            (tokens + 32 * size + fixed) + (wanted - min(wanted, size)) * (tokens + fixed) / rows
            for size in sizes
        ]
        place = int(decode_loop.choose_size(sizes, jnp.int32(wanted), tokens=tokens))
        assert spent[place] == pytest.approx(min(spent))
    few = decode_loop.choose_size(sizes, jnp.int32(1), tokens=tokens)
    assert (sizes[int(few)] > 0) == (rows < 64)
