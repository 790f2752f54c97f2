"""How many tokens the host expects the first windows of a row to take."""

import canvas_rows
import numpy as np
import pytest

from jdllm import sampling_params
from jdllm.scheduler import canvas_windows, request

S, LENGTHS = 64, (3, 8, 16)
MODES = [("FullAttnMultiBlock", mode) for mode in ("exact", "delayed", "window")] + [
    ("FastDLLM", mode) for mode in ("none", "prefix", "dual")
]


@pytest.mark.parametrize(("algorithm", "mode"), MODES)
def test_no_window_is_wider_unless_a_block_has_ended(algorithm, mode):
    rng = np.random.default_rng(7)
    narrower = 0
    for _ in range(80):
        options = {"cache_mode": mode, "block_length": int(rng.choice(LENGTHS)), "threshold": 0.5}
        if algorithm == "FullAttnMultiBlock":
            options |= {
                "cache_delay_iter": int(rng.integers(0, 3)),
                "refresh_interval": int(rng.choice([1, 2, 3, 4, 100])),
                "block_add_threshold": float(rng.choice([0.0, 0.1, 1.0])),
            }
        row = canvas_rows.random_row(rng, S, algorithm, options=options)
        start, length = row.start, options["block_length"]
        begun = row.text.index(None) - start
        given = sampling_params.DllmParams(algorithm=algorithm, **options)
        one = request.Request(
            request_id="one",
            prompt_ids=row.text[:start],
            sampling=sampling_params.SamplingParams(dllm=given.resolve(given)),
            max_new_tokens=row.end - start,
            canvas_ids=[-1 if token is None else token for token in row.text],
        )
        count = int(rng.integers(1, 5))
        bound = canvas_windows.first_window(one, count)
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

        is_shifted = bool(rng.random() < 0.5) and algorithm == "FullAttnMultiBlock"
        every = canvas_rows.forwards(algorithm, [row], S, propose, is_shifted=is_shifted)
        first_block = slice(
            start + begun // length * length, start + (begun // length + 1) * length
        )
        for forward, (window, planned, _) in zip(range(1, count + 2), every, strict=False):
            if window is None or not planned.masked[0, first_block].any():
                break
            assert forward == 1 or int((window.high - window.low)[0]) <= bound, (options, forward)
    assert narrower > 5 or mode in ("exact", "none"), "only whole canvases are expected"
