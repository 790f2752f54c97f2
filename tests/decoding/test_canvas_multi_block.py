"""FullAttnMultiBlock against a block table kept in plain Python, forward by forward.

The oracle has what the rule is told with: a list of blocks with counts, their activation, a time
of completion and a cached flag each, walked block by block. The algorithm has none of these.
"""

import dataclasses

import numpy as np
import pytest
from support import canvas_rows

NAME = "FullAttnMultiBlock"
S, R, END = 40, 10, 5
NEVER = 10_000
every_family = pytest.mark.parametrize("is_shifted", [False, True], ids=["llada", "dream"])


class Oracle:
    """One row."""

    def __init__(self, row, *, is_shifted):
        self.row, self.is_shifted = row, is_shifted
        self.option = lambda name: row.option(NAME, name)
        self.text = [canvas_rows.MASK if token is None else token for token in row.text]
        self.masked = [token is None for token in row.text]
        self.to_write = list(self.masked)
        self.blocks = [
            {"start": 0, "end": row.start, "full": True, "completed_at": 0, "cached": False}
        ]
        self.cache, self.nfe, self.done = 0, 0, False
        self.add_block()

    def left(self, block):
        return sum(self.masked[block["start"] : block["end"]])

    def progress(self, block):
        total = sum(self.to_write[block["start"] : block["end"]])
        return np.float32(total - self.left(block)) / np.float32(total) if total else 1.0

    def add_block(self):
        previous = self.blocks[-1]
        self.blocks.append({
            "start": previous["end"],
            "end": min(previous["end"] + self.option("block_length"), self.row.end),
            "full": self.progress(previous) >= np.float32(self.option("decoded_token_threshold")),
            "completed_at": None,
            "cached": False,
        })  # fmt: skip

    def first_end(self):
        for i in range(self.row.start, self.row.end):
            if not self.masked[i] and self.text[i] in self.row.end_ids:
                return i
        return None

    def plan(self):
        """Returns (low, high), None if the row is done."""
        end = self.first_end() if self.option("early_stop") else None
        for i in range(self.row.end):
            if end is not None and i > end and self.to_write[i]:
                self.text[i], self.masked[i] = self.row.filler, False
        if not any(self.masked):
            self.done = True
            return None
        self.nfe += 1
        for previous, block in zip(self.blocks, self.blocks[1:], strict=False):
            if self.progress(previous) >= np.float32(self.option("decoded_token_threshold")):
                block["full"] = True

        def may_add():
            following = self.blocks[-1]["end"]
            return following < self.row.end and (end is None or following <= end)

        add = np.float32(self.option("block_add_threshold"))
        last = self.blocks[-1]
        if may_add() and (self.progress(last) >= add or self.left(last) == 0):
            self.add_block()
        # Only where whole blocks are given: the forward must be for something.
        while not any(self.left(block) for block in self.blocks):
            self.add_block()
        return self.window()

    def window(self):
        mode, delay = self.option("cache_mode"), self.option("cache_delay_iter")
        before, reached = self.cache, []
        for block in self.blocks:
            if block["cached"]:
                continue
            if self.left(block):
                break
            if block["completed_at"] is None:
                block["completed_at"] = self.nfe
            if self.nfe - block["completed_at"] >= delay:
                block["cached"] = True
                self.cache = block["end"]
            else:
                reached.append(block)
                if not self.is_shifted:
                    break
        is_due = self.nfe % self.option("refresh_interval") == 0
        full = (0, self.row.length)
        if mode == "exact" or is_due:
            return full
        if mode == "window":
            return full if self.nfe == 1 else (before, self.blocks[-1]["end"])
        if self.cache > before:
            return (before, self.row.length)
        return full if reached else (before, self.row.length)

    def candidates(self):
        return [i for i in range(self.blocks[-1]["end"]) if self.masked[i]]

    def update(self, tokens, entropy):
        threshold = np.float32(self.option("threshold"))
        candidates = self.candidates()
        if self.is_shifted:
            chosen = {i for i in candidates if entropy[i] < threshold}
        else:
            chosen = {i for i in candidates if not entropy[i] > threshold}
            chosen.add(min(candidates, key=lambda i: (entropy[i], i)))
        for block in self.blocks:
            if block["full"] and self.left(block):
                inside = [i for i in range(block["start"], block["end"]) if self.masked[i]]
                if not chosen.intersection(inside):
                    chosen.add(min(inside, key=lambda i: (entropy[i], i)))
                break
        for i in chosen:
            self.text[i], self.masked[i] = int(tokens[i]), False


def random_options(rng):
    return {
        "threshold": float(rng.choice([0.0, 0.1, 0.25, 0.5, 2.0])),
        "block_add_threshold": float(rng.choice([0.0, 0.1, 0.3, 0.5, 1.0])),
        "decoded_token_threshold": float(rng.choice([0.0, 0.5, 0.95, 1.0])),
        "early_stop": bool(rng.random() < 0.7),
        "cache_mode": str(rng.choice(["exact", "delayed", "window"])),
        "cache_delay_iter": int(rng.choice([0, 1, 2, 3, 5, NEVER])),
        "refresh_interval": int(rng.choice([1, 2, 3, 7, NEVER])),
        "block_length": int(rng.integers(1, 13)),
    }


@every_family
@pytest.mark.parametrize("seed", range(16))
def test_every_window_and_every_write_is_the_oracle_s(seed, is_shifted):
    rng = np.random.default_rng(seed)
    rows = [
        canvas_rows.random_row(
            rng,
            S,
            NAME,
            end_ids=(END,) if rng.random() < 0.5 else (),
            options=random_options(rng),
        )
        for _ in range(R)
    ]
    oracles = [Oracle(row, is_shifted=is_shifted) for row in rows]

    def propose(forward, _):
        return canvas_rows.random_fields(seed, forward, R, S)

    for forward, (window, planned, canvas) in enumerate(
        canvas_rows.forwards(NAME, rows, S, propose, is_shifted=is_shifted)
    ):
        fields = propose(forward, None)
        for r, oracle in enumerate(oracles):
            expected = oracle.plan() if not oracle.done else None
            assert planned.is_done[r] == (expected is None)
            assert planned.masked[r, : rows[r].length].tolist() == oracle.masked
            if expected is not None:
                assert (window.low[r], window.high[r]) == expected, (forward, r)
                assert np.flatnonzero(window.wanted[r]).tolist() == oracle.candidates()
                oracle.update(fields["tokens"][r], fields["entropy"][r].astype(np.float32))
            assert canvas.tokens[r, : rows[r].length].tolist() == oracle.text
            assert canvas.masked[r, : rows[r].length].tolist() == oracle.masked
            assert canvas.step[r] == oracle.nfe


def by_position(seed, *, rate=0.0):
    """Returns a `propose` whose tokens depend on the position alone, some of them END."""
    tokens = np.random.default_rng([seed, 99]).integers(0, END, (R, S))
    tokens[np.random.default_rng([seed, 98]).random((R, S)) < rate] = END

    def propose(forward, _):
        return canvas_rows.random_fields(seed, forward, R, S) | {"tokens": tokens}

    return propose


def ragged(options, **changes):
    rng = np.random.default_rng(7)
    return [
        canvas_rows.plain(
            int(rng.integers(1, 9)), int(rng.integers(1, 31)), options=options, **changes
        )
        for _ in range(R)
    ]


def blocks_of(row, planned, r):
    """Returns the numbers of the blocks that have masked positions."""
    length = row.options["block_length"]
    return sorted({int(i - row.start) // length for i in np.flatnonzero(planned.masked[r])})


@every_family
def test_adding_at_one_writes_block_after_block(is_shifted):
    options = {"block_add_threshold": 1.0, "decoded_token_threshold": 1.0, "block_length": 6}
    rows = ragged(options)
    last, multi_nfe, _ = canvas_rows.run(NAME, rows, S, by_position(1), is_shifted=is_shifted)
    for window, planned, _canvas in canvas_rows.forwards(
        NAME, rows, S, by_position(1), is_shifted=is_shifted
    ):
        for r, row in enumerate(rows):
            if not planned.is_done[r]:
                first = blocks_of(row, planned, r)[0]
                wanted = np.flatnonzero(window.wanted[r]) - row.start
                assert set(wanted // 6) == {first}
    # The same as the rule that knows the current block alone (<= or <: no entropy is 0.37).
    single = [dataclasses.replace(row, options={"block_length": 6, "threshold": 0.37})
              for row in rows]  # fmt: skip
    rows = [dataclasses.replace(row, options=row.options | {"threshold": 0.37}) for row in rows]
    last, multi_nfe, _ = canvas_rows.run(NAME, rows, S, by_position(1))
    expected, nfe, _ = canvas_rows.run("EntropyThreshold", single, S, by_position(1))
    np.testing.assert_array_equal(last.tokens, expected.tokens)
    np.testing.assert_array_equal(multi_nfe, nfe)


@every_family
def test_an_infinite_threshold_writes_a_block_a_step(is_shifted):
    rows = ragged({"threshold": 1e30, "block_add_threshold": 1.0, "block_length": 4})
    last, nfe, _ = canvas_rows.run(NAME, rows, S, by_position(2), is_shifted=is_shifted)
    assert nfe.tolist() == [-(-(row.end - row.start) // 4) for row in rows]
    assert not last.masked.any(), "tail blocks are written, too"


@every_family
def test_a_threshold_of_zero_writes_one_position_or_two_a_step(is_shifted):
    # The block's forced one; LLaDA's rule takes the lowest of all besides.
    rows = ragged({"threshold": 0.0, "block_add_threshold": 0.1, "block_length": 4})
    before = None
    for _, planned, canvas in canvas_rows.forwards(
        NAME, rows, S, by_position(3), is_shifted=is_shifted
    ):
        written = (planned.masked & ~canvas.masked).sum(axis=1)
        allowed = {0, 1} if is_shifted else {0, 1, 2}
        assert set(written.tolist()) <= allowed
        before = written if before is None else np.maximum(before, written)
    assert before.max() == max(allowed)


@every_family
@pytest.mark.parametrize("mode", ["delayed", "window"])
def test_refresh_and_delay_of_one_are_exact(mode, is_shifted):
    changed = {"cache_mode": mode, "refresh_interval": 1, "cache_delay_iter": 1}
    assert_windows_are_full(changed, is_shifted)


@every_family
def test_a_delay_that_never_ends_is_exact(is_shifted):
    changed = {"cache_mode": "delayed", "refresh_interval": NEVER, "cache_delay_iter": NEVER}
    assert_windows_are_full(changed, is_shifted)


def assert_windows_are_full(options, is_shifted):
    rows = ragged(options | {"block_length": 5}, suffix=1)
    for window, planned, _ in canvas_rows.forwards(
        NAME, rows, S, by_position(4), is_shifted=is_shifted
    ):
        if window is not None:
            busy = ~planned.is_done
            assert (window.is_full == busy).all()


@every_family
@pytest.mark.parametrize("seed", range(6))
def test_early_stop_gives_the_full_run_s_text_up_to_the_end_token(seed, is_shifted):
    options = {"block_length": 6, "threshold": 0.3, "early_stop": True}
    rows = ragged(options, end_ids=(END,))
    propose = by_position(seed, rate=0.08)
    early, nfe, _ = canvas_rows.run(NAME, rows, S, propose, is_shifted=is_shifted)
    rows = ragged(options | {"early_stop": False}, end_ids=(END,))
    full, full_nfe, _ = canvas_rows.run(NAME, rows, S, propose, is_shifted=is_shifted)
    ended = 0
    for r, row in enumerate(rows):
        text, whole = (c.tokens[r, row.start : row.end].tolist() for c in (early, full))
        length = whole.index(END) if END in whole else len(whole)
        assert text[:length] == whole[:length]
        assert text[length : length + 1] == whole[length : length + 1]
        assert set(text[length + 1 :]) <= {canvas_rows.FILLER}
        assert nfe[r] <= full_nfe[r]
        ended += nfe[r] < full_nfe[r]
    assert ended, "some rows need fewer forwards"


def test_behind_the_end_only_what_was_to_be_written_is_filled_and_not_with_that_end():
    # Two prompt tokens, an end token among what is given, and a suffix that holds the other one.
    text = [1, END, None, None, 6, 3, None, 4, None, 2, END]
    row = canvas_rows.Row(text=text, start=2, end=9, end_ids=(END, 6),
                          options={"block_length": 3})  # fmt: skip
    propose = by_position(5)
    last, _, _ = canvas_rows.run(NAME, [row] * R, S, propose)
    tokens = propose(0, None)["tokens"]
    for r in range(R):
        fill = canvas_rows.FILLER
        expected = [1, END, *tokens[r, 2:4], 6, 3, fill, 4, fill, 2, END]
        assert last.tokens[r, : len(text)].tolist() == expected


@every_family
def test_a_block_that_is_not_finished_first_is_written_by_threshold_alone(is_shifted):
    # Blocks 0 and 1 are created from the start; block 0 has the lowest entropies.
    row = canvas_rows.plain(2, 8, options={"block_length": 4, "block_add_threshold": 0.0,
                                           "decoded_token_threshold": 0.0})  # fmt: skip
    fields = {name: np.full((1, S), 0.9) for name in ("prob", "margin")}
    fields |= {"tokens": np.full((1, S), 3), "entropy": np.full((1, S), 0.9)}
    fields["entropy"][0, [3, 7]] = [0.6, 0.2]
    steps = canvas_rows.forwards(NAME, [row], S, lambda *_: fields, is_shifted=is_shifted)
    _, planned, canvas = next(steps)
    assert np.flatnonzero(planned.masked[0] & ~canvas.masked[0]).tolist() == [3, 7]
    _, planned, canvas = next(steps)
    assert np.flatnonzero(planned.masked[0] & ~canvas.masked[0]).tolist() == [2]


def test_window_mode_forwards_less_than_delayed_and_delayed_less_than_exact():
    forwarded = {}
    for mode in ("exact", "delayed", "window"):
        options = {"block_length": 4, "cache_mode": mode, "cache_delay_iter": 1,
                   "refresh_interval": NEVER}  # fmt: skip
        last, nfe, forwarded[mode] = canvas_rows.run(NAME, ragged(options), S, by_position(6))
        assert not last.masked.any()
    assert (forwarded["window"] <= forwarded["delayed"]).all()
    assert (forwarded["delayed"] <= forwarded["exact"]).all()
    assert forwarded["window"].sum() < forwarded["delayed"].sum() < forwarded["exact"].sum()
