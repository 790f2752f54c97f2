"""Proposals against dense numpy logits: penalty, forbidden ids, draws and their seeds."""

import jax
import numpy as np
import pytest
from support.blocks import make_block

from jdllm.layers import unembedding
from jdllm.runner.block import proposal, sampling

V, D, T = 50, 16, 4
MASK_ID = 7
propose = jax.jit(proposal.propose, static_argnames=("forbidden_ids", "implementation"))


def case(seed, rows):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, T, D)).astype(np.float32)
    lm_head = rng.normal(size=(V, D)).astype(np.float32)
    tokens = rng.integers(0, V, (rows, T)).astype(np.int32)
    return hidden, lm_head, tokens


def sampling_rows(rows, *, temperature=0.0, top_p=1.0, top_k=0, seed=0):
    seeds = np.stack([np.zeros(rows), np.broadcast_to(seed, rows)], axis=1)
    return sampling.SamplingRows(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        seed=seeds.astype(np.uint32),
    )


def run(hidden, lm_head, tokens, rows, *, penalty=0.0, start=0, step=0, wanted=None):
    count = len(tokens)
    block = make_block(
        tokens,
        np.ones_like(tokens, bool),
        np.ones_like(tokens, bool),
        penalty_lambda=penalty,
    )
    positions = start + np.tile(np.arange(T, dtype=np.int32), (count, 1))
    return propose(
        hidden,
        unembedding.LMHead(weight=lm_head),
        block,
        positions,
        np.full(count, step, np.int32),
        rows,
        np.ones_like(tokens, bool) if wanted is None else wanted,
        forbidden_ids=(MASK_ID,),
    )


@pytest.mark.parametrize("penalty", [0.0, 0.5, 3.0])
def test_greedy_proposal_equals_dense_logits_with_the_block_local_penalty(penalty):
    hidden, lm_head, tokens = case(1, 6)
    tokens[0, 1] = MASK_ID  # the left neighbour may be the mask id itself
    got = run(hidden, lm_head, tokens, sampling_rows(6), penalty=penalty)
    for r in range(6):
        for i in range(T):
            z = (hidden[r, i].astype(np.float64) @ lm_head.T.astype(np.float64)).copy()
            if i > 0:
                z[tokens[r, i - 1]] -= penalty
            allowed = z.copy()
            allowed[MASK_ID] = -np.inf
            best = int(np.argmax(allowed))
            prob = np.exp(z[best] - np.log(np.sum(np.exp(z - z.max()))) - z.max())
            assert int(got.tokens[r, i]) == best
            np.testing.assert_allclose(got.prob[r, i], prob, rtol=1e-4)
    np.testing.assert_array_equal(got.tokens, got.best)
    assert not np.any(got.is_drawn)


def filter_oracle(logits, top_k, top_p):
    """Sorted scan of one position; no ties in the data."""
    order = np.argsort(-logits)
    if top_k > 0:
        order = order[:top_k]
    p = np.exp(logits[order] - logits[order].max())
    p /= p.sum()
    kept, mass = [], 0.0
    for token, mass_of in zip(order, p, strict=True):
        if kept and mass >= top_p:
            break
        kept.append(int(token))
        mass += mass_of
    return set(kept)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(0, 1.0), (5, 1.0), (0, 0.6), (8, 0.7), (1, 1.0), (0, 1e-6), (0, 1e-46), (99, 0.9)],
)
def test_filter_keeps_what_a_sorted_scan_keeps(top_k, top_p):
    logits = np.random.default_rng(3).normal(size=(T, V)).astype(np.float32) * 2
    got = np.asarray(sampling.filter_logits(logits, np.int32(top_k), np.float32(top_p)))
    for i in range(T):
        kept = set(np.flatnonzero(got[i] > sampling.NEVER / 2).tolist())
        assert kept == filter_oracle(logits[i].astype(np.float64), top_k, top_p)


def test_draws_follow_the_tempered_filtered_distribution():
    hidden, lm_head, tokens = case(4, 1)
    hidden, draws, temperature = np.repeat(hidden, 400, axis=0), [], 1.5
    tokens = np.repeat(tokens, 400, axis=0)
    for batch in range(5):
        rows = sampling_rows(
            400, temperature=temperature, top_k=6, seed=np.arange(400) + 1000 * batch
        )
        draws.append(np.asarray(run(hidden, lm_head, tokens, rows).tokens))
    draws = np.concatenate(draws)  # [2000, T]
    for i in range(T):
        z = hidden[0, i] @ lm_head.T / temperature
        z[MASK_ID] = -np.inf
        kept = np.argsort(-z)[:6]
        p = np.exp(z[kept] - z[kept].max())
        p /= p.sum()
        counts = np.array([(draws[:, i] == token).sum() for token in kept])
        assert counts.sum() == len(draws), "nothing outside the top 6 is ever drawn"
        chi2 = np.sum((counts - len(draws) * p) ** 2 / (len(draws) * p))
        assert chi2 < 25.7  # 99.99 % quantile of chi-square with 5 degrees of freedom


def test_a_draw_depends_on_seed_position_and_step_but_not_on_row_or_neighbours():
    hidden, lm_head, tokens = case(6, 3)
    rows = sampling_rows(3, temperature=2.0, seed=np.array([11, 22, 33]))
    together = run(hidden, lm_head, tokens, rows)
    for r in range(3):
        alone = run(
            hidden[r : r + 1],
            lm_head,
            tokens[r : r + 1],
            sampling_rows(1, temperature=2.0, seed=11 * (r + 1)),
        )
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[r])
    one = (np.repeat(hidden[:1], 40, 0), lm_head, np.repeat(tokens[:1], 40, 0))
    rows = sampling_rows(40, temperature=2.0, seed=5)
    base = np.asarray(run(*one, rows).tokens)
    assert np.all(base == base[0]), "equal seeds draw alike in every row"
    assert not np.array_equal(base, run(*one, rows, step=1).tokens)
    assert not np.array_equal(base, run(*one, rows, start=4).tokens)


def test_greedy_rows_are_untouched_by_a_sampling_neighbour():
    hidden, lm_head, tokens = case(8, 2)
    greedy = run(hidden, lm_head, tokens, sampling_rows(2))
    rows = sampling_rows(2, temperature=np.array([0.0, 3.0]), seed=9)
    mixed = run(hidden, lm_head, tokens, rows)
    np.testing.assert_array_equal(mixed.tokens[0], greedy.tokens[0])
    np.testing.assert_array_equal(mixed.prob[0], greedy.prob[0])
    assert mixed.is_drawn.tolist() == [False, True]


def test_confidence_of_a_drawn_token_is_relative_to_the_best_and_capped():
    hidden, lm_head, tokens = case(9, 1)
    rows = sampling_rows(1, temperature=4.0, seed=3)
    got = run(hidden, lm_head, tokens, rows)
    for i in range(T):
        z = hidden[0, i].astype(np.float64) @ lm_head.T.astype(np.float64)
        z_best = max(z[v] for v in range(V) if v != MASK_ID)
        p_best = np.exp(z_best) / np.sum(np.exp(z))
        relative = np.exp((z[int(got.tokens[0, i])] - z_best) / 4.0)
        np.testing.assert_allclose(got.prob[0, i], min(p_best, relative), rtol=1e-4)


def test_the_forbidden_id_is_never_proposed_or_drawn():
    hidden, lm_head, tokens = case(10, 8)
    lm_head[MASK_ID] = 0
    hidden[..., 0], lm_head[MASK_ID, 0] = 5.0, 50.0  # the mask id wins every argmax
    greedy = run(hidden, lm_head, tokens, sampling_rows(8))
    drawn = run(hidden, lm_head, tokens, sampling_rows(8, temperature=5.0, seed=np.arange(8)))
    assert not np.any(np.asarray(greedy.tokens) == MASK_ID)
    assert not np.any(np.asarray(drawn.tokens) == MASK_ID)
    assert np.all(np.asarray(greedy.prob) < 1e-3), "but it keeps its share of the normaliser"


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_positions_that_cannot_change_are_left_alone_and_change_no_other(count, share):
    assert 3 * T <= proposal.ROWS_OF_A_PASS < 100 * T, "both ways are taken"
    hidden, lm_head, tokens = case(11, count)
    rng = np.random.default_rng(12)
    wanted = rng.random((count, T)) < share
    hidden[~wanted] = np.nan
    rows = sampling_rows(count, temperature=rng.choice([0.0, 2.0], count), seed=np.arange(count))
    got = run(hidden, lm_head, tokens, rows, penalty=0.5, wanted=wanted)
    every = run(np.nan_to_num(hidden), lm_head, tokens, rows, penalty=0.5)
    for name in ("tokens", "best"):
        expected = np.where(wanted, getattr(every, name), tokens)
        np.testing.assert_array_equal(getattr(got, name), expected)
    for name in ("prob", "best_prob"):
        expected = np.where(wanted, getattr(every, name), 0.0)
        np.testing.assert_array_equal(getattr(got, name), expected)


def test_the_probability_of_a_draw_and_the_entropy_are_those_of_dense_logits():
    hidden, lm_head, tokens = case(13, 4)
    temperature, top_k = np.float32([0.0, 0.7, 2.0, 1.3]), 5
    got = run(
        hidden, lm_head, tokens, sampling_rows(4, temperature=temperature, top_k=top_k, seed=8)
    )
    for r in range(4):
        for i in range(T):
            z = hidden[r, i].astype(np.float64) @ lm_head.T.astype(np.float64)
            p = np.exp(z - z.max()) / np.sum(np.exp(z - z.max()))
            np.testing.assert_allclose(got.entropy[r, i], -np.sum(p * np.log(p)), rtol=1e-4)
            if temperature[r] == 0:
                np.testing.assert_allclose(got.draw_prob[r, i], got.prob[r, i])
                continue
            z[MASK_ID] = -np.inf
            kept = np.argsort(-z)[:top_k]
            share = np.exp(z[kept] / temperature[r] - z[kept].max() / temperature[r])
            place = np.flatnonzero(kept == int(got.tokens[r, i]))
            np.testing.assert_allclose(
                got.draw_prob[r, i], (share / share.sum())[place[0]], rtol=1e-4
            )
