"""Options at their edges, and what guided forwards count."""

import pytest
from support.canvas_asks import Ask
from support.canvas_engine import generate, shared

pytestmark = pytest.mark.campaign  # an engine, whose programs take long to compile


def test_a_block_longer_than_the_canvas_is_the_canvas():
    huge, whole = (
        Ask(prompt=[4] * 5, wanted=10, dllm={"block_length": length}) for length in (2**31 - 1, 64)
    )
    first, second = generate(shared("llada"), [huge, whole])
    assert first["output_ids"] == second["output_ids"]


def test_guided_forwards_count_twice_in_every_figure():
    one = shared("llada")
    counters = one._built.core.counters
    before = (counters.real_positions, counters.computed_positions, counters.decode_steps)
    dllm = {"algorithm": "LLaDA", "block_length": 8, "cfg_scale": 1.0}
    (result,) = generate(one, [Ask(prompt=[4] * 8, wanted=8, dllm=dllm)])
    after = (counters.real_positions, counters.computed_positions, counters.decode_steps)
    real, computed, steps = (b - a for a, b in zip(before, after, strict=True))
    assert result["meta_info"]["nfe"] == steps == 16
    assert real == 16 * 16 <= computed
