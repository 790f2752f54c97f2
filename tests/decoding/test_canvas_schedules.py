"""LLaDA and Dream against oracles in plain Python, and what their schedules add up to."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from support import canvas_rows

from jdllm.decoding.canvas import interface

S, R = 40, 10


def random_rows(rng, algorithm, options):
    return [canvas_rows.random_row(rng, S, algorithm, options=options(rng)) for _ in range(R)]


uniform = jax.jit(interface.uniform, static_argnums=1)


def drawn(canvas, r, forward, salt):
    """The row's uniform numbers, from the canvas of that row alone."""
    one = jax.tree.map(lambda leaf: leaf[r : r + 1], canvas)
    one = dataclasses.replace(one, step=np.int32([forward]))
    return np.asarray(uniform(one, salt))[0]


def best(score, candidates, count):
    """The `count` candidates with the highest score, the first ones of equals."""
    return sorted(candidates, key=lambda i: (-score[i], i))[:count]


def transfer_schedule(masks, steps):
    base, remainder = divmod(masks, steps)
    return [base + (i < remainder) for i in range(steps)]


class LLaDAOracle:
    """One row; blocks are walked with a counter of their steps, as published."""

    def __init__(self, row):
        self.row = row
        self.masked = [token is None for token in row.text]
        length, steps = row.option("LLaDA", "block_length"), row.options.get("steps")
        starts = range(row.start, row.end, length)
        self.blocks = [range(i, min(i + length, row.end)) for i in starts]
        self.plans = []
        for block in self.blocks:
            masks = sum(self.masked[i] for i in block)
            if steps:
                self.plans.append(transfer_schedule(masks, max(1, steps // len(self.blocks))))
            else:
                self.plans.append([1] * masks)

    def candidates(self):
        """Returns the current block's, and forgets finished blocks; no step writes nothing."""
        while self.blocks and not any(self.masked[i] for i in self.blocks[0]):
            del self.blocks[0], self.plans[0]
        return [i for i in self.blocks[0] if self.masked[i]] if self.blocks else []

    def update(self, score):
        chosen = best(score, self.candidates(), self.plans[0].pop(0))
        for i in chosen:
            self.masked[i] = False
        return chosen


@pytest.mark.parametrize("seed", range(8))
def test_llada_is_the_oracle_s_forward_by_forward(seed):
    rng = np.random.default_rng(seed)
    rows = random_rows(
        rng,
        "LLaDA",
        lambda rng: {
            "block_length": int(rng.integers(1, 13)),
            "steps": [None, 1, 3, 16, 100][rng.integers(5)],
            "remasking": str(rng.choice(["low_confidence", "random"])),
        },
    )
    oracles = [LLaDAOracle(row) for row in rows]

    def propose(forward, _):
        return canvas_rows.random_fields(seed, forward, R, S)

    start = canvas_rows.as_numpy(canvas_rows.make_canvas("LLaDA", rows, S))
    for forward, (window, planned, canvas) in enumerate(
        canvas_rows.forwards("LLaDA", rows, S, propose)
    ):
        fields = propose(forward, None)
        for r, (row, oracle) in enumerate(zip(rows, oracles, strict=True)):
            candidates = oracle.candidates()
            assert bool(planned.is_done[r]) == (not candidates)
            if not candidates:
                continue
            assert np.flatnonzero(window.wanted[r]).tolist() == candidates
            assert window.is_full[r]
            is_random = row.option("LLaDA", "remasking") == "random"
            score = drawn(start, r, forward, salt=1) if is_random else fields["prob"][r]
            chosen = oracle.update(score)
            assert canvas.masked[r, : row.length].tolist() == oracle.masked
            assert canvas.tokens[r, chosen].tolist() == fields["tokens"][r, chosen].tolist()


@pytest.mark.parametrize("masks", [1, 5, 12, 32])
@pytest.mark.parametrize("steps", [1, 4, 7, 32])
def test_llada_s_steps_of_a_block_write_all_of_it_evenly(masks, steps):
    row = canvas_rows.plain(3, masks, options={"block_length": 32, "steps": steps})
    counts = [
        int((planned.masked & ~canvas.masked).sum())
        for _, planned, canvas in canvas_rows.forwards(
            "LLaDA", [row], S, lambda forward, _: canvas_rows.random_fields(0, forward, 1, S)
        )
    ]
    expected = [count for count in transfer_schedule(masks, steps) if count]
    assert counts == [*expected, 0], "the last plan finds nothing left"
    assert sum(expected) == masks and max(expected) - min(expected) <= 1


class DreamOracle:
    """One row; times are a grid, its arithmetic exact (float64)."""

    def __init__(self, row):
        self.row = row
        self.masked = [token is None for token in row.text]
        self.steps = row.options.get("steps") or sum(self.masked)
        eps = float(np.float32(row.option("Dream", "eps")))
        self.times = [1 + (eps - 1) * i / self.steps for i in range(self.steps + 1)]

    def candidates(self):
        return [i for i, is_masked in enumerate(self.masked) if is_masked]

    def share(self, step):
        if step >= self.steps - 1:
            return 1.0
        return 1 - self.times[step + 1] / self.times[step]

    def update(self, step, fields, uniform):
        candidates, share = self.candidates(), self.share(step)
        alg, temperature = (self.row.option("Dream", name) for name in ("alg", "alg_temp"))
        if alg == "origin":
            chosen = [i for i in candidates if uniform[i] < share]
        else:
            confidence = {
                "maskgit_plus": fields["prob"],
                "topk_margin": fields["margin"],
                "entropy": -fields["entropy"],
            }[alg]
            score = confidence.astype(np.float64)
            if temperature:
                score = score / temperature - np.log(-np.log(np.maximum(uniform, 1e-30)))
            chosen = best(score, candidates, math.floor(len(candidates) * share + 1e-9))
        for i in chosen:
            self.masked[i] = False
        return chosen


@pytest.mark.parametrize("seed", range(8))
def test_dream_is_the_oracle_s_forward_by_forward(seed):
    rng = np.random.default_rng(seed)
    rows = random_rows(
        rng,
        "Dream",
        lambda rng: {
            "steps": [None, 1, 5, 16, 60][rng.integers(5)],
            "alg": str(rng.choice(["origin", "maskgit_plus", "topk_margin", "entropy"])),
            "alg_temp": float(rng.choice([0.0, 0.0, 0.3, 2.0])),
            "eps": float(rng.choice([0.0, 1e-3, 0.1])),
        },
    )
    oracles = [DreamOracle(row) for row in rows]

    def propose(forward, _):
        return canvas_rows.random_fields(seed, forward, R, S)

    start = canvas_rows.as_numpy(canvas_rows.make_canvas("Dream", rows, S))
    for forward, (window, planned, canvas) in enumerate(
        canvas_rows.forwards("Dream", rows, S, propose)
    ):
        fields = propose(forward, None)
        for r, (row, oracle) in enumerate(zip(rows, oracles, strict=True)):
            candidates = oracle.candidates()
            assert bool(planned.is_done[r]) == (not candidates)
            if not candidates:
                continue
            assert np.flatnonzero(window.wanted[r]).tolist() == candidates
            assert window.is_full[r]
            of_row = {name: values[r] for name, values in fields.items()}
            chosen = oracle.update(forward, of_row, drawn(start, r, forward, salt=2))
            assert canvas.masked[r, : row.length].tolist() == oracle.masked, (row.options, forward)
            assert canvas.tokens[r, chosen].tolist() == fields["tokens"][r, chosen].tolist()
            assert canvas.step[r] <= oracle.steps


def dream_counts(written, **options):
    row = canvas_rows.plain(2, written, options={"alg": "maskgit_plus"} | options)
    return [
        int((planned.masked & ~canvas.masked).sum())
        for window, planned, canvas in canvas_rows.forwards(
            "Dream", [row], S, lambda forward, _: canvas_rows.random_fields(1, forward, 1, S)
        )
        if window is not None
    ]


def test_dream_writes_one_position_a_step_without_eps():
    assert dream_counts(30, eps=0.0) == [1] * 30
    assert dream_counts(30, eps=0.0, steps=10) == [3] * 10


def test_dream_s_shares_are_rounded_down_and_its_last_step_writes_the_rest():
    # 24 (1 - eps) / 24 is less than one position; from then on there is always one to spare.
    assert dream_counts(24) == [0, *[1] * 22, 2]
    assert dream_counts(5, eps=1.0, steps=4) == [0, 0, 0, 5]
    assert dream_counts(38, steps=1) == [38]


@pytest.mark.parametrize("alg", ["origin", "maskgit_plus"])
def test_dream_s_draws_follow_the_seed_and_nothing_else(alg):
    options = {"alg": alg, "alg_temp": 0.5, "steps": 6}
    seeds = [1, 2, 1, *range(3, R)]
    rows = [canvas_rows.plain(2, 30, options=options, seed=(0, seed)) for seed in seeds]

    def propose(forward, _):
        fields = canvas_rows.random_fields(3, forward, 1, S)
        return {name: np.repeat(values, R, axis=0) for name, values in fields.items()}

    steps = canvas_rows.forwards("Dream", rows, S, propose)
    trace = np.stack([canvas.masked for _, _, canvas in steps])
    np.testing.assert_array_equal(trace[:, 0], trace[:, 2])
    assert all((trace[:, 0] != trace[:, r]).any() for r in range(R) if seeds[r] != 1)
