"""EntropyThreshold and FastDLLM, which write one block at a time, against plain Python."""

import numpy as np
import pytest
from support import canvas_rows

S, R = 40, 10


class Oracle:
    """One row: blocks from left to right, and the forwards of each counted."""

    def __init__(self, row, algorithm):
        self.row, self.algorithm = row, algorithm
        self.text = [canvas_rows.MASK if token is None else token for token in row.text]
        self.masked = [token is None for token in row.text]
        length = row.option(algorithm, "block_length")
        starts = range(row.start, row.end, length)
        self.num_blocks = len(starts)
        self.blocks = [{"range": range(i, min(i + length, row.end)), "forwards": 0} for i in starts]
        for block in self.blocks:
            block["total"] = sum(self.masked[i] for i in block["range"])

    def plan(self):
        """Returns (low, high), None when all is written."""
        while self.blocks and not any(self.masked[i] for i in self.blocks[0]["range"]):
            del self.blocks[0]
        if not self.blocks:
            return None
        block = self.blocks[0]
        block["forwards"] += 1
        mode = self.row.option(self.algorithm, "cache_mode") if "Fast" in self.algorithm else "none"
        if mode == "none" or block["forwards"] == 1:
            return 0, self.row.length
        return block["range"].start, {
            "prefix": self.row.length, "dual": block["range"].stop,
        }[mode]  # fmt: skip

    def candidates(self):
        return [i for i in self.blocks[0]["range"] if self.masked[i]]

    def chosen(self, fields):
        candidates = self.candidates()
        if self.algorithm == "EntropyThreshold":
            threshold = np.float32(self.row.option(self.algorithm, "threshold"))
            lowest = min(candidates, key=lambda i: (fields["entropy"][i], i))
            return [i for i in candidates if fields["entropy"][i] < threshold or i == lowest]
        prob = fields["prob"]
        ordered = sorted(candidates, key=lambda i: (-prob[i], i))
        factor, steps = (self.row.option(self.algorithm, name) for name in ("factor", "steps"))
        if factor:
            return by_factor(ordered, prob, factor)
        if steps:
            per_block = max(1, steps // self.num_blocks)
            base, remainder = divmod(self.blocks[0]["total"], per_block)
            return ordered[: base + (self.blocks[0]["forwards"] <= remainder)]
        threshold = np.float32(self.row.option(self.algorithm, "threshold"))
        return [i for i in ordered if prob[i] >= threshold or i == ordered[0]]

    def update(self, fields):
        for i in self.chosen(fields):
            self.text[i], self.masked[i] = int(fields["tokens"][i]), False


def by_factor(ordered, prob, factor):
    """Returns the longest run from the first on in which each passes its own bound."""
    run = ordered[:1]
    for n, i in enumerate(ordered[1:], start=2):
        if not prob[i] >= np.float32(1) - np.float32(factor) / np.float32(n + 1):
            break
        run.append(i)
    return run


def random_options(rng, algorithm):
    options = {
        "block_length": int(rng.integers(1, 13)),
        "threshold": float(rng.choice([0.0, 0.25, 0.5, 0.9, 1.0])),
    }
    if algorithm == "FastDLLM":
        options["cache_mode"] = str(rng.choice(["none", "prefix", "dual"]))
        options["factor"] = [None, None, 0.3, 1.0, 2.5][rng.integers(5)]
        options["steps"] = [None, None, 4, 20][rng.integers(4)]
    return options


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("algorithm", ["EntropyThreshold", "FastDLLM"])
def test_every_window_and_every_write_is_the_oracle_s(algorithm, seed):
    rng = np.random.default_rng(seed)
    rows = [
        canvas_rows.random_row(rng, S, algorithm, options=random_options(rng, algorithm))
        for _ in range(R)
    ]
    oracles = [Oracle(row, algorithm) for row in rows]

    def propose(forward, _):
        fields = canvas_rows.random_fields(seed, forward, R, S)
        fields["prob"] = np.where(fields["prob"] < 0.5, fields["prob"], fields["prob"] ** 0.2)
        return fields | {name: fields[name].astype(np.float32) for name in ("prob", "entropy")}

    for forward, (window, planned, canvas) in enumerate(
        canvas_rows.forwards(algorithm, rows, S, propose)
    ):
        fields = propose(forward, None)
        for r, (row, oracle) in enumerate(zip(rows, oracles, strict=True)):
            expected = oracle.plan()
            assert planned.is_done[r] == (expected is None)
            if expected is None:
                continue
            assert (window.low[r], window.high[r]) == expected, (forward, r)
            assert np.flatnonzero(window.wanted[r]).tolist() == oracle.candidates()
            oracle.update({name: values[r] for name, values in fields.items()})
            assert canvas.tokens[r, : row.length].tolist() == oracle.text
            assert canvas.masked[r, : row.length].tolist() == oracle.masked


@pytest.mark.parametrize("at_threshold", [0, 1], ids=["below", "equal"])
def test_fast_dllm_takes_what_equals_the_threshold_and_entropy_threshold_does_not(at_threshold):
    value = np.float32(0.5) if at_threshold else np.nextafter(np.float32(0.5), np.float32(0))
    fields = {name: np.full((1, S), value) for name in ("prob", "margin", "entropy")}
    fields["tokens"] = np.full((1, S), 3)
    fields["prob"][0, 4], fields["entropy"][0, 4] = 0.9, 0.1
    written = {}
    for algorithm in ("FastDLLM", "EntropyThreshold"):
        row = canvas_rows.plain(2, 8, options={"threshold": 0.5, "block_length": 8})
        _, _, canvas = next(canvas_rows.forwards(algorithm, [row], S, lambda *_: fields))
        written[algorithm] = 8 - int(canvas.masked.sum())
    assert written == {
        "FastDLLM": 8 if at_threshold else 1,
        "EntropyThreshold": 1 if at_threshold else 8,
    }


def test_a_failure_of_the_last_candidate_is_not_written():
    # Factor 1: bounds 1/2, 2/3, 3/4; the reference accepts a failure that comes last.
    row = canvas_rows.plain(2, 3, options={"factor": 1.0, "block_length": 8})
    fields = {name: np.full((1, S), 0.0) for name in ("prob", "margin", "entropy")}
    fields["tokens"] = np.full((1, S), 3)
    fields["prob"][0, 2:5] = [0.8, 0.7, 0.9]
    _, _, canvas = next(canvas_rows.forwards("FastDLLM", [row], S, lambda *_: fields))
    assert np.flatnonzero(canvas.masked[0]).tolist() == [3]


def test_a_block_that_its_full_forward_finishes_has_no_other():
    # A threshold of 0 writes a block a forward.
    for mode in ("none", "prefix", "dual"):
        row = canvas_rows.plain(
            3, 30, options={"threshold": 0.0, "cache_mode": mode, "block_length": 8}
        )
        _, nfe, forwarded = canvas_rows.run(
            "FastDLLM", [row], S, lambda forward, _: canvas_rows.random_fields(0, forward, 1, S)
        )
        assert (nfe[0], forwarded[0]) == (4, 4 * 33)


def test_the_caches_forward_what_they_say():
    # 2 blocks of 8, 16 steps: a full forward and 7 of the cache's window for each block.
    forwarded = {}
    for mode in ("none", "prefix", "dual"):
        row = canvas_rows.plain(
            4, 16, suffix=3, options={"steps": 16, "block_length": 8, "cache_mode": mode}
        )
        _, nfe, tokens = canvas_rows.run(
            "FastDLLM", [row], S, lambda forward, _: canvas_rows.random_fields(0, forward, 1, S)
        )
        assert nfe[0] == 16
        forwarded[mode] = int(tokens[0])
    full = 2 * 23
    assert forwarded == {
        "none": 16 * 23,
        "prefix": full + 7 * (8 + 8 + 3) + 7 * (8 + 3),
        "dual": full + 7 * 8 + 7 * 8,
    }
