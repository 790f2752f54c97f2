"""Canvas rows for tests: built from plain Python, and run forward after forward without a model.

A row is described by its text, None where something is to be written; `propose` says what a
model would have said. Positions that the window does not want get what the interface promises.
"""

import dataclasses
import functools

import jax
import numpy as np

from jdllm import decoding
from jdllm.algorithms import lookup
from jdllm.decoding.canvas.interface import Canvas, CanvasParams, CanvasProposal

MASK = -7  # a token no proposal holds, so that a masked position cannot pass for a written one
FILLER = 8  # as no proposal holds either


@dataclasses.dataclass
class Row:
    """`text` is the whole canvas; [start, end) is what may be written."""

    text: list
    start: int
    end: int
    end_ids: tuple = ()
    filler: int = FILLER
    options: dict = dataclasses.field(default_factory=dict)
    seed: tuple = (0, 0)

    @property
    def length(self):
        return len(self.text)

    def option(self, algorithm, name):
        return self.options.get(name, lookup.TABLE[algorithm].defaults[name])


def plain(prompt, written, suffix=0, **changes):
    """Returns a row of so many prompt tokens, positions to write, and given tokens behind."""
    text = [1] * prompt + [None] * written + [2] * suffix
    return Row(text=text, start=prompt, end=prompt + written, **changes)


def random_row(rng, S, algorithm, *, end_ids=(), options):
    """Returns a row of up to S positions with some given ones, perhaps a suffix, a tail block."""
    start = int(rng.integers(1, S // 3))
    end = int(rng.integers(start + 1, S + 1))
    length = end if rng.random() < 0.5 else int(rng.integers(end, S + 1))
    text = [int(token) for token in rng.integers(0, 5, length)]
    share = rng.choice([0.0, 0.0, 0.2, 0.7])
    for i in range(start, end):
        if rng.random() >= share:
            text[i] = None
    if all(token is not None for token in text):
        text[start] = None
    return Row(text=text, start=start, end=end, end_ids=end_ids, options=options,
               seed=tuple(int(word) for word in rng.integers(0, 2**32, 2)))  # fmt: skip


def make_canvas(algorithm, rows, S, *, is_shifted=False):
    """Returns the rows' canvas before the first forward."""
    R = len(rows)
    params = lookup.padding(lookup.CANVAS, R)
    params["temperature"] = np.zeros(R, np.float32)
    params["seed"] = np.array([row.seed for row in rows], np.uint32)
    tokens, masked = np.zeros((R, S), np.int32), np.zeros((R, S), bool)
    end_ids = np.full((R, 2), -1, np.int32)
    for r, row in enumerate(rows):
        values = {name: row.option(algorithm, name) for name in lookup.TABLE[algorithm].defaults}
        given = {name: value for name, value in values.items() if value is not None}
        lookup.fill(params, r, algorithm, given, row_length=S)
        params["temperature"][r] = row.options.get("temperature", 0.0)
        masked[r, : row.length] = [token is None for token in row.text]
        tokens[r, : row.length] = [MASK if token is None else token for token in row.text]
        end_ids[r, : len(row.end_ids)] = row.end_ids
    canvas = Canvas(
        tokens=tokens,
        masked=masked,
        start=np.array([row.start for row in rows], np.int32),
        end=np.array([row.end for row in rows], np.int32),
        length=np.array([row.length for row in rows], np.int32),
        step=np.zeros(R, np.int32),
        end_ids=end_ids,
        filler=np.array([row.filler for row in rows], np.int32),
        is_done=np.zeros(R, bool),
        params=CanvasParams(**params),
        extra=(),
    )
    canvas = jax.tree.map(jax.numpy.asarray, canvas)
    begun = decoding.canvas_algorithm(algorithm, is_shifted=is_shifted).begin(canvas)
    return dataclasses.replace(canvas, extra=begun)


@functools.cache
def compiled(algorithm, is_shifted=False):
    """Returns (plan, update), compiled."""
    rule = decoding.canvas_algorithm(algorithm, is_shifted=is_shifted)
    return jax.jit(rule.plan), jax.jit(rule.update)


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def made_proposal(canvas, window, fields):
    """Returns `fields` (arrays [R, S]) as a proposal for the positions that the window wants."""
    wanted = window.wanted
    prob = np.where(wanted, fields["prob"], 0).astype(np.float32)
    return CanvasProposal(
        tokens=np.where(wanted, fields["tokens"], canvas.tokens).astype(np.int32),
        prob=prob,
        logprob=np.where(wanted, np.log(np.maximum(prob, 1e-30)), 0).astype(np.float32),
        entropy=np.where(wanted, fields["entropy"], np.inf).astype(np.float32),
        margin=np.where(wanted, fields["margin"], 0).astype(np.float32),
    )


def forwards(algorithm, rows, S, propose, *, is_shifted=False, most=1000):
    """Yields (window, canvas as planned, canvas as written) per forward until no row has one.

    `propose(forward, planned)` returns the proposal's fields. `window` is None with the last
    planned canvas.
    """
    plan, update = compiled(algorithm, is_shifted)
    canvas = make_canvas(algorithm, rows, S, is_shifted=is_shifted)
    for forward in range(most):
        planned, window = plan(canvas)
        seen, shown = as_numpy(planned), as_numpy(window)
        check_window(seen, shown)
        if seen.is_done.all():
            yield None, seen, seen
            return
        written = update(planned, made_proposal(seen, shown, propose(forward, seen)))
        canvas = dataclasses.replace(written, step=written.step + ~written.is_done)
        yield shown, seen, as_numpy(canvas)
    raise AssertionError(f"rows are still open after {most} forwards")


def check_window(canvas, window):
    """Checks what the interface says of every window."""
    busy = ~canvas.is_done
    assert (busy <= canvas.masked.any(axis=1)).all(), "a row without masks is done"
    for r in range(len(busy)):
        low, high = window.low[r], window.high[r]
        if not busy[r]:
            assert (low, high) == (0, 0) and not window.wanted[r].any() and not window.is_full[r]
            continue
        assert 0 <= low < high <= canvas.length[r]
        inside = np.arange(canvas.tokens.shape[1])
        inside = (inside >= low) & (inside < high)
        assert window.wanted[r].any(), "a forward is for something"
        assert not (window.wanted[r] & ~(canvas.masked[r] & inside)).any()
        assert window.is_full[r] == (low == 0 and high == canvas.length[r])


def random_fields(seed, forward, R, S, *, vocab=7):
    """Returns fields of few distinct values, so that ties and values at a threshold occur."""
    rng = np.random.default_rng([seed, forward])
    coarse = np.float32([0.1, 0.25, 0.5, 0.75, 1.0])
    fields = {"tokens": rng.integers(0, vocab, (R, S))}
    for name in ("prob", "entropy", "margin"):
        fine = rng.random((R, S)).astype(np.float32)
        fields[name] = np.where(rng.random((R, S)) < 0.3, rng.choice(coarse, (R, S)), fine)
    return fields


def run(algorithm, rows, S, propose, **options):
    """Returns (final canvas, forwards per row, tokens forwarded per row)."""
    tokens = np.zeros(len(rows), int)
    for window, planned, canvas in forwards(algorithm, rows, S, propose, **options):
        if window is None:
            return planned, canvas.step, tokens
        tokens += window.high - window.low
    raise AssertionError("unreachable")
