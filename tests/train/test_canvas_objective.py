"""The objective of full-attention models against loops written from its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.train import canvas_objective

BLOCK, SEQ, ROWS, MASK = 4, 30, 64, 99
# The last one leaves no room for a whole block: prompt 9, answer 20, and 30 positions.
LENGTHS = [(5, 7), (5, 12), (1, 29), (9, 20)]  # of prompt and answer
PROMPTS = np.array([prompt for prompt, _ in LENGTHS] * ROWS)
ENDS = np.array([prompt + answer for prompt, answer in LENGTHS] * ROWS)
TOKENS = np.arange(len(PROMPTS) * SEQ).reshape(-1, SEQ) % 90


def noisy(seed=0, **changes):
    values = dict(block_size=BLOCK, full_mask_fraction=0.2, mask_token_id=MASK)
    batch = canvas_objective.add_noise(
        jax.random.key(seed),
        jnp.array(TOKENS, jnp.int32),
        jnp.array(PROMPTS),
        jnp.array(ENDS),
        canvas_objective.CanvasNoiseConfig(**{**values, **changes}),
    )
    return jax.tree.map(np.asarray, batch)


def canvas_blocks(batch, row):
    """Returns, block after block of the row's canvas, which positions are masked."""
    masked, end = batch.weights[row] > 0, batch.valid[row].sum()
    return [masked[low : min(low + BLOCK, end)] for low in range(PROMPTS[row], end, BLOCK)]


def test_canvases_end_at_any_block_that_holds_the_answer_and_see_no_further():
    batch = noisy()
    drawn = {lengths: set() for lengths in LENGTHS}
    for row, (prompt, end) in enumerate(zip(PROMPTS, ENDS, strict=True)):
        length = batch.valid[row].sum()
        assert batch.valid[row].tolist() == [p < length for p in range(SEQ)]
        drawn[prompt, end - prompt].add(int(length))
    for (prompt, answer), lengths in drawn.items():
        blocks = range(1, SEQ // BLOCK + 2)
        ends = {min(prompt + k * BLOCK, SEQ) for k in blocks if k * BLOCK >= answer}
        assert lengths == ends, (prompt, answer)
    assert np.array_equal(batch.visible, np.tile(batch.valid[:, None, :], (1, SEQ, 1)))
    assert np.array_equal(batch.positions, np.tile(np.arange(SEQ), (len(PROMPTS), 1)))


def test_masks_and_weights():
    batch = noisy()
    assert np.array_equal(batch.targets, TOKENS)
    for row, (prompt, end) in enumerate(zip(PROMPTS, ENDS, strict=True)):
        masked = batch.weights[row] > 0
        assert masked.any()
        assert not masked[:prompt].any() and not masked[~batch.valid[row]].any()
        is_end_shown = False
        for p in range(SEQ):
            assert batch.tokens[row, p] == (MASK if masked[p] else TOKENS[row, p])
            if masked[p]:
                assert batch.weights[row, p] == np.float32(0.1 if is_end_shown else 1.0)
            elif p >= end - 1 and batch.valid[row, p]:
                is_end_shown = True


def test_from_left_to_right_there_is_clean_then_open_then_masked(monkeypatch):
    monkeypatch.setattr(canvas_objective, "RISING_FRACTION", 1.0)
    batch = noisy(full_mask_fraction=0.0)
    shares = {ahead: [] for ahead in range(4)}
    begins = set()
    for row, end in enumerate(ENDS):
        blocks = canvas_blocks(batch, row)
        begin = next(i for i, block in enumerate(blocks) if block.any())
        # An open block may have no mask by chance, so that the first one is here or before.
        assert all(block.all() for block in blocks[begin + 3 :])
        begins.add(begin)
        if begin * BLOCK < end - PROMPTS[row]:
            for ahead, block in zip(shares, blocks[begin:], strict=False):
                shares[ahead].append(block.mean())
    assert begins >= {0, 1, 2, 3}
    means = [np.mean(values) for values in shares.values()]
    assert means == sorted(means) and means[0] < 0.8 and means[3] == 1.0


def test_ratios_rise_or_are_one_for_the_canvas():
    config = canvas_objective.CanvasNoiseConfig(
        block_size=BLOCK, full_mask_fraction=0.0, mask_token_id=MASK
    )
    prompts, ends = jnp.array(PROMPTS), jnp.array(ENDS)
    key = jax.random.key(1)
    found = canvas_objective.draw_ratios(key, prompts, ends, SEQ, config)
    open_blocks, same = [], []
    for row, (first, ratio) in enumerate(zip(*map(np.asarray, found), strict=True)):
        if first == PROMPTS[row] and len(set(ratio)) == 1:
            same.append(ratio[0])
            continue
        assert (first - PROMPTS[row]) % BLOCK == 0 and first < ENDS[row]
        of_block = ratio[first::BLOCK]
        assert np.array_equal(ratio[first:], np.repeat(of_block, BLOCK)[: SEQ - first])
        assert (np.diff(of_block) >= 0).all() and (of_block[3:] == 1).all()
        if len(of_block) > 3:
            open_blocks.append((of_block < 1).sum())
    assert set(open_blocks) == {1, 2, 3}
    assert 0.3 < len(same) / len(PROMPTS) < 0.7
    assert np.mean(same) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_full_mask_fraction_is_the_share_of_canvases_that_are_all_masks(fraction):
    batch = noisy(full_mask_fraction=fraction)
    whole = [all(b.all() for b in canvas_blocks(batch, row)) for row in range(len(PROMPTS))]
    assert np.mean(whole) == 1.0 if fraction else np.mean(whole) < 0.3
