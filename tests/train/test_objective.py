"""The objective's mask, noise and loss against loops written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.train import objective

BLOCK, SEQ, BLOCKS, MASK = 4, 16, 3, 99


def config(**changes):
    values = dict(
        block_size=BLOCK, answer_blocks=BLOCKS, copies=2, full_mask_fraction=0.3, mask_token_id=MASK
    )
    return objective.NoiseConfig(**{**values, **changes})


def noisy(prompt_lens, total_lens, seed=0, **changes):
    rows = len(prompt_lens)
    tokens = jnp.arange(rows * SEQ, dtype=jnp.int32).reshape(rows, SEQ) % 90
    return tokens, objective.add_noise(
        jax.random.key(seed),
        tokens,
        jnp.array(prompt_lens),
        jnp.array(total_lens),
        config(**changes),
    )


def test_visibility_is_what_a_block_sees_when_it_is_decoded():
    prompts = [5, 8]
    _, batch = noisy(prompts, [12, 16])
    for row, prompt in enumerate(prompts):
        # (stream, copy, block) of every position, by hand
        where = [("clean", 0, i // BLOCK) for i in range(SEQ)]
        for copy in range(2):
            for j in range(BLOCKS * BLOCK):
                where.append(("noisy", copy, prompt // BLOCK + j // BLOCK))
        for q, (q_kind, q_copy, q_block) in enumerate(where):
            for k, (k_kind, k_copy, k_block) in enumerate(where):
                if q_kind == "clean":
                    want = k_kind == "clean" and k_block <= q_block
                elif k_kind == "clean":
                    want = k_block < q_block
                else:
                    want = (q_copy, q_block) == (k_copy, k_block)
                assert bool(batch.visible[row, q, k]) == want, (row, q, k)


def test_only_answer_positions_are_masked_and_every_block_has_one():
    prompts, totals = np.array([5, 8, 11]), np.array([12, 16, 12])
    for seed in range(20):
        tokens, batch = noisy(prompts, totals, seed=seed)
        place = np.asarray(batch.positions)[:, SEQ:]
        masked = np.asarray(batch.weights) == 1
        noisy_tokens = np.asarray(batch.tokens)[:, SEQ:]
        for row in range(3):
            editable = (place[row] >= prompts[row]) & (place[row] < totals[row])
            assert not masked[row][~editable].any()
            for chunk in range(2 * BLOCKS):
                cut = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
                assert masked[row][cut].any() == editable[cut].any()
            for j, p in enumerate(place[row]):
                if p < SEQ:
                    want = MASK if masked[row, j] else int(tokens[row, p])
                    assert noisy_tokens[row, j] == want
        assert np.array_equal(np.asarray(batch.tokens)[:, :SEQ], tokens)


def test_full_mask_fraction_one_masks_every_answer_position():
    _, batch = noisy([5], [12], full_mask_fraction=1.0)
    place = np.asarray(batch.positions)[0, SEQ:]
    assert np.array_equal(np.asarray(batch.weights)[0], (place >= 5) & (place < 12))


def test_masked_cross_entropy_is_the_weighted_mean_over_masked_positions():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 5)).astype(np.float32)
    targets = rng.integers(0, 5, 6)
    weights = np.array([1.0, 0.0, 1.0, 0.1, 0.0, 0.0], np.float32)
    losses = [-(logits[i][targets[i]] - np.log(np.exp(logits[i]).sum())) for i in range(6)]
    right = [logits[i].argmax() == targets[i] for i in range(6)]
    loss, accuracy = objective.masked_cross_entropy(
        jnp.array(logits), jnp.array(targets), jnp.array(weights)
    )
    assert float(loss) == pytest.approx(np.average(losses, weights=weights), rel=1e-5)
    assert float(accuracy) == pytest.approx(np.average(right, weights=weights))


def test_an_answer_of_more_blocks_than_copies_shows_each_of_them_sometimes():
    prompts, totals = [5, 8, 1], [16, 12, 16]
    seen = [set(), set(), set()]
    for seed in range(60):
        _, batch = noisy(prompts, totals, seed=seed, copies=1, answer_blocks=2)
        place = np.asarray(batch.positions)[:, SEQ:]
        for row in range(3):
            blocks = place[row, ::BLOCK] // BLOCK
            assert blocks[1] == blocks[0] + 1
            seen[row] |= set(blocks.tolist())
            assert np.asarray(batch.weights)[row].any()
    assert seen == [{1, 2, 3}, {2, 3}, {0, 1, 2, 3}]
