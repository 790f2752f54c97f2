"""JointThresholdInDel against a step written position by position, over given logits.

The oracle follows SGLang 0.5.23's `JointThresholdInDel`, whose stored traces it repeats first
(`goldens/llada22`, block after block, step after step); then the rule repeats the oracle.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.blocks import make_block, make_proposal

import pallas_kernels
from jdllm import decoding
from jdllm.decoding.block import interface
from jdllm.runner import full_forward
from jdllm.runner.block import edit_tokens
from jdllm.spec import EditTokens

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada22"
RUNS = json.loads((GOLDEN / "meta.json").read_text())["runs"]
RULE = decoding.BLOCK_ALGORITHMS["JointThresholdInDel"]
step_of = jax.jit(lambda block, proposal: RULE.update(block, proposal))
question_of = jax.jit(lambda block, proposal: RULE.question(block, proposal))


@dataclasses.dataclass
class Ids:
    mask: int
    delete: int
    split: int

    @property
    def all(self):
        return (self.mask, self.delete, self.split)


class Oracle:
    """One block. `x` are its tokens, `prompt` the length of its fixed head."""

    def __init__(self, x, prompt, ids, threshold, edit_threshold, max_post_edit_steps):
        self.x, self.prompt, self.ids = list(x), prompt, ids
        self.threshold, self.edit_threshold = np.float32(threshold), np.float32(edit_threshold)
        self.post = max_post_edit_steps
        self.orig = [i >= prompt for i in range(len(x))]
        self.num_post = self.num_steps = 0
        self.seen, self.had = set(), [set() for _ in x]
        self.finished = self.done = False

    def step(self, logits):
        ids, x, B = self.ids, self.x, len(self.x)
        if self.finished:
            self.done = True
            return
        prob = np.exp(logits - logits.max(axis=1, keepdims=True))
        prob = (prob / prob.sum(axis=1, keepdims=True)).astype(np.float32)
        best = [int(np.argmax(row)) for row in logits]
        free = range(self.prompt, B)
        masks = [i for i in free if x[i] == ids.mask]
        original = [i for i in masks if self.orig[i]]
        self.num_steps += 1
        self.num_post += not original
        last = self.num_steps > B + self.post
        last |= self.num_post >= self.post if self.post else not original
        if not last:
            for i in original:
                if best[i] == ids.mask:
                    best[i] = self.first_best(logits[i], {ids.mask})
        p = [prob[i][best[i]] for i in range(B)]
        if last or not original:
            fill = masks
        else:
            need = 1 + len(masks) - len(original)
            fill = [i for i in masks if p[i] > self.threshold]
            if len(fill) < need:
                fill = sorted(sorted(masks, key=lambda i: (-p[i], i))[:need])
        if self.post == 0 and original and set(original) <= set(fill):
            last, fill = True, masks
        written = [i for i in free if x[i] != ids.mask]
        edit = [i for i in written if p[i] > self.edit_threshold and best[i] != x[i]]
        selected = sorted([*fill, *edit])
        if not selected:
            self.finished = self.done = True
            return
        if last:
            for i in selected:
                if best[i] in ids.all:
                    best[i] = self.first_best(logits[i], set(ids.all))
        elif tuple(x) in self.seen:
            changing = [i for i in selected if best[i] != x[i]]
            if changing:
                q = min(changing, key=lambda i: (p[i], i))
                banned = self.had[q] | ({ids.mask} if q in original else set())
                best[q] = self.first_best(logits[q], banned)
        self.seen.add(tuple(x))
        new = list(x)
        for i in selected:
            self.had[i].add(best[i])
            new[i] = best[i]
        orig = self.orig
        if any(best[i] in (ids.delete, ids.split) for i in selected):
            new, orig = self.moved(new)
        unchanged = new == x
        self.x, self.orig = new, orig
        if last:
            self.finished, self.done = True, unchanged

    @staticmethod
    def first_best(row, banned):
        return min((t for t in range(len(row)) if t not in banned), key=lambda t: (-row[t], t))

    def moved(self, new):
        tokens, flags = new[: self.prompt], self.orig[: self.prompt]
        for i in range(self.prompt, len(new)):
            if new[i] == self.ids.split:
                tokens += [self.ids.mask, self.x[i]]
                flags += [False, self.orig[i]]
            elif new[i] != self.ids.delete:
                tokens.append(new[i])
                flags.append(self.orig[i])
        missing = max(0, len(new) - len(tokens))
        tokens += [self.ids.mask] * missing
        flags += [False] * missing
        return tokens[: len(new)], flags[: len(new)]


@functools.cache
def model():
    return full_forward.load_model(GOLDEN)


@pytest.mark.parametrize(
    "run", [1, 4, *(pytest.param(run, marks=pytest.mark.campaign) for run in (0, 2, 3))]
)
def test_the_oracle_repeats_the_stored_traces(run):
    meta, B = RUNS[run], 8
    prompt = np.load(GOLDEN / f"gen{run}_prompt.npy")[0].tolist()
    trace, orig = (np.load(GOLDEN / f"gen{run}_{name}.npy") for name in ("trace", "orig"))
    whole, at = prompt[: len(prompt) // B * B], 0
    head = prompt[len(whole) :]
    with jax.default_matmul_precision("highest"):
        for count in meta["steps_per_block"]:
            block = Oracle(
                [*head, *[300] * (B - len(head))], len(head), Ids(300, 310, 311), **meta["config"]
            )
            for _ in range(count):
                np.testing.assert_array_equal(block.x, trace[at, 0])
                ids = [*whole, *block.x]
                padded = [ids + [300] * (48 - len(ids))]  # no block sees a later one
                block.step(np.asarray(model().logits(padded))[0, len(whole) : len(ids)])
                np.testing.assert_array_equal(block.x, trace[at, 1])
                masked = np.equal(block.x, 300)
                np.testing.assert_array_equal(np.array(block.orig)[masked], orig[at, 1][masked])
                at += 1
            assert block.done
            whole, head = [*whole, *block.x], []
    assert at == len(trace)


def propose(logits, ids, block):
    """Returns the proposal for logits [B, T, V], with the answers of the rule's question."""
    rows, T, V = logits.shape
    special = edit_tokens.Special(
        mask_id=ids.mask, edits=EditTokens(delete=ids.delete, split=ids.split)
    )
    flat = jnp.asarray(logits).reshape(rows * T, V)
    plain = pallas_kernels.logits_stats(flat, forbidden_ids=special.ids)
    three = flat[:, jnp.array(special.ids)]
    stats = special.with_edits(plain, three)
    logprob = (stats.best_logit - stats.logsumexp).reshape(rows, T)
    proposal = make_proposal(
        stats.best_id.reshape(rows, T),
        jnp.exp(logprob),
        logprob=logprob,
        best_logprob=logprob,
        entropy=stats.entropy.reshape(rows, T),
        edits=special.proposal(plain, three, (rows, T)),
    )
    question = question_of(block, proposal)
    return edit_tokens.answered(
        proposal, question, lambda r, place: jnp.asarray(logits)[r, place]
    ), question


@pytest.mark.parametrize("ids", [(0, 5, 11), (11, 0, 5), (5, 11, 0)])
def test_statistics_with_the_edit_tokens_put_in_are_those_without_the_mask_alone(ids):
    """Few different logits, so that ties occur; entropy is that of the whole vocabulary."""
    logits = np.random.default_rng(ids[0]).integers(0, 3, (64, 12)).astype(np.float32)
    special = edit_tokens.Special(mask_id=ids[0], edits=EditTokens(delete=ids[1], split=ids[2]))
    plain = pallas_kernels.logits_stats(logits, forbidden_ids=special.ids)
    found = special.with_edits(plain, logits[:, list(special.ids)])
    expected = pallas_kernels.logits_stats(logits, forbidden_ids=(special.mask_id,))
    for name in ("best_id", "best_logit", "second_id", "second_logit", "logsumexp", "entropy"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize(
    "seed",
    [
        *range(2),
        *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 6)),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 200)),
    ],
)
def test_the_rule_equals_the_oracle_for_whole_blocks(seed):
    rng = np.random.default_rng(seed)
    rows, T, V = 8, 6, 24  # more tokens than a row has steps
    ids = Ids(*rng.permutation(V)[:3].tolist())
    head = rng.integers(0, T, rows)
    editable = np.arange(T) >= head[:, None]
    # A prompt may hold the three ids as well: they are text there.
    tokens = np.where(editable, ids.mask, rng.integers(0, V, (rows, T))).astype(np.int32)
    options = {
        "threshold": rng.choice(np.float32([0.0, 0.3, 0.9]), rows),
        "edit_threshold": rng.choice(np.float32([0.0, 0.3, 1.0]), rows),
        "max_post_edit_steps": rng.choice([0, 1, 4, 9], rows),
    }
    oracles = [
        Oracle(tokens[r].tolist(), head[r], ids, **{k: v[r].item() for k, v in options.items()})
        for r in range(rows)
    ]
    block = make_block(tokens, editable.copy(), editable, extra=RULE.init_extra(rows, T), **options)
    cycle = rng.normal(size=(2, rows, T, V)).astype(np.float32) * 2  # two states: loops occur
    asked, moves = 0, 0
    for step in range(T + 9 + 2):
        fresh = rng.normal(size=(rows, T, V)).astype(np.float32) * 2
        logits = np.where((np.arange(rows) % 2 == 0)[:, None, None], cycle[step % 2], fresh)
        logits[..., list(ids.all)] += 2
        proposal, question = propose(logits, ids, block)
        asked += int(np.sum(question.wants))
        block = step_of(block, proposal)
        moves += int(np.sum(block.extra["trace"].source != np.arange(T)))
        for r, oracle in enumerate(oracles):
            oracle.step(logits[r])
            np.testing.assert_array_equal(block.tokens[r], oracle.x)
            masked = editable[r] & np.equal(oracle.x, ids.mask)
            np.testing.assert_array_equal(block.masked[r], masked)
            assert bool(block.done[r]) == oracle.done
            assert bool(RULE.is_final(block)[r]) == oracle.finished
    assert np.all(block.done), "a block ends within T + max_post_edit_steps + 2 steps"
    assert not np.any(block.masked)
    assert not np.isin(np.asarray(block.tokens)[editable], ids.all).any()
    assert asked > 0 and moves > 0


def test_the_trace_says_where_tokens_came_from_and_who_wrote_them():
    ids, T, V = Ids(3, 4, 5), 4, 6
    tokens = np.int32([[3, 0, 1, 2]])
    editable = np.ones((1, T), bool)
    block = make_block(
        tokens, tokens == 3, editable, extra=RULE.init_extra(1, T), max_post_edit_steps=9
    )
    logits = np.zeros((1, T, V), np.float32)
    for place, token in enumerate((2, 5, 4, 2)):  # write 2, split before 0, delete 1, keep 2
        logits[0, place, token] = 5
    proposal, _ = propose(logits, ids, block)
    after = step_of(block, proposal)
    assert after.tokens.tolist() == [[2, 3, 0, 2]]
    assert after.masked.tolist() == [[False, True, False, False]]
    trace = RULE.trace(after)
    assert trace.source.tolist() == [[0, T, 1, 3]]
    assert trace.written.tolist() == [[True, False, False, False]]
    assert trace.num_edited.tolist() == [2]
    expected = 5 - np.log(np.exp(5) + 5)
    np.testing.assert_allclose(trace.logprobs[0, 0], expected, atol=1e-6)
    assert interface.move(np.int32([[7, 8, 9, 6]]), trace.source, 0).tolist() == [[7, 0, 8, 6]]


def test_a_drawn_token_is_no_mistake_and_keeps_that_when_it_moves():
    ids, V = Ids(3, 4, 5), 6
    tokens = np.int32([[3, 3]])
    block = make_block(
        tokens, tokens == 3, np.ones((1, 2), bool), extra=RULE.init_extra(1, 2), threshold=0.0
    )
    logits = np.zeros((1, 2, V), np.float32)
    logits[0, 0, 4], logits[0, 1, 0] = 9, 9
    proposal, _ = propose(logits, ids, block)
    drawn = dataclasses.replace(proposal, tokens=jnp.int32([[4, 1]]), is_drawn=jnp.array([True]))
    block = step_of(block, drawn)  # the draw deletes position 0; the 1 moves there
    assert block.tokens.tolist() == [[1, 3]]
    logits[0, 0] = 0
    logits[0, 0, 2] = 9
    proposal, _ = propose(logits, ids, block)
    assert step_of(block, proposal).tokens[0, 0] == 1
