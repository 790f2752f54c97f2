"""How many tokens the host expects the first windows of a row to take."""

import canvas_rows
import numpy as np
import pytest

from jdllm import sampling_params

S, LENGTHS = 64, (3, 8, 16)
MODES = [("FullAttnMultiBlock", mode) for mode in ("exact", "delayed", "window")] + [
    ("FastDLLM", mode) for mode in ("none", "prefix", "dual")
]


@pytest.mark.parametrize(("algorithm", "mode"), MODES)
def test_no_window_is_wider_unless_a_block_has_ended(algorithm, mode):
    rng = np.random.default_rng(7)
    narrower = 0
    for _ in range(40):
        options = {"cache_mode": mode, "block_length": int(rng.choice(LENGTHS)), "threshold": 0.5}
        if algorithm == "FullAttnMultiBlock":
            options |= {
                "cache_delay_iter": int(rng.integers(0, 3)),
                "refresh_interval": int(rng.choice([1, 2, 3, 4, 100])),
                "block_add_threshold": float(rng.choice([0.01, 0.1, 1.0])),
            }
        start, written = int(rng.integers(1, 24)), int(rng.integers(1, 40))
        row = canvas_rows.plain(start, written, int(rng.integers(0, S - start - written + 1)))
        row.options = options
        dllm = sampling_params.DllmParams(algorithm=algorithm).resolve(
            sampling_params.DllmParams(algorithm=algorithm, **options)
        )
        count = int(rng.integers(1, 5))
        bound = dllm.first_window(start=start, written=0, length=row.length, forwards=count)
        assert 0 < bound <= row.length
        narrower += bound < row.length

        def propose(forward, canvas, rng=rng):
            shape = canvas.masked.shape
            return {
                "tokens": np.ones(shape, np.int32),
                "prob": rng.random(shape),
                "entropy": rng.random(shape) * 4,  # few pass
                "margin": rng.random(shape),
            }

        every = canvas_rows.forwards(algorithm, [row], S, propose)
        for forward, (window, planned, _) in zip(range(1, count + 2), every, strict=False):
            first_block = planned.masked[0, start : start + options["block_length"]]
            if window is None or not first_block.any():
                break
            assert forward == 1 or int((window.high - window.low)[0]) <= bound, (options, forward)
    assert narrower > 5 or mode in ("exact", "none"), "only whole canvases are expected"


def test_what_was_written_before_counts():
    dllm = sampling_params.DllmParams(
        algorithm="FullAttnMultiBlock",
        cache_mode="window",
        cache_delay_iter=1,
        refresh_interval=100,
        block_length=8,
    )
    found = [
        dllm.first_window(start=10, written=written, length=90, forwards=2)
        for written in (0, 16, 79)
    ]
    assert found == [24, 40, 80]
