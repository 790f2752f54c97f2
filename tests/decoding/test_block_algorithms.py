"""LowConfidence and JointThreshold against per-row numpy oracles over random statistics."""

import numpy as np
import pytest
from support.blocks import make_block, make_proposal

from jdllm import decoding
from jdllm.algorithms import lookup

VOCAB = 7


def random_case(rng, rows, length):
    editable = np.ones((rows, length), bool)
    for row in editable:
        row[: rng.integers(0, length)] = False
    masked = editable & (rng.random((rows, length)) < 0.6)
    tokens = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
    proposed = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
    # Few distinct values, so that ties and values at the threshold occur.
    prob = rng.choice(np.float32([0.1, 0.25, 0.5, 0.75, 1.0]), (rows, length))
    return tokens, masked, editable, proposed, prob


def low_confidence_oracle(tokens, masked, proposed, prob, threshold):
    """One row, one step, position by position."""
    tokens, masked = tokens.copy(), masked.copy()
    if not masked.any():
        return tokens, masked, True
    chosen = [i for i in range(len(tokens)) if masked[i] and prob[i] > threshold]
    if not chosen:
        best = max(prob[i] for i in range(len(tokens)) if masked[i])
        chosen = [next(i for i in range(len(tokens)) if masked[i] and prob[i] == best)]
    for i in chosen:
        tokens[i], masked[i] = proposed[i], False
    return tokens, masked, False


def joint_threshold_oracle(row, proposed, prob, *, threshold, edit_threshold, budget):
    """One row, one step; `row` is a dict that is mutated."""
    if row["done"]:
        return
    length = len(row["tokens"])
    if not any(row["masked"]):
        row["post"] += 1
        if row["post"] > budget:
            row["done"] = True
            return
    fill = [i for i in range(length) if row["masked"][i] and prob[i] > threshold]
    candidates = [i for i in range(length) if row["masked"][i]]
    if candidates and not fill:
        fill = [max(candidates, key=lambda i: (prob[i], -i))]
    edit = [
        i
        for i in range(length)
        if not row["masked"][i]
        and row["editable"][i]
        and prob[i] > edit_threshold
        and proposed[i] != row["tokens"][i]
    ]
    if not fill and not edit:
        row["done"] = True
        return
    for i in fill + edit:
        row["tokens"][i], row["masked"][i] = proposed[i], False


@pytest.mark.parametrize("seed", range(20))
def test_low_confidence_equals_the_oracle_for_a_whole_block(seed):
    rng = np.random.default_rng(seed)
    rows, length = 6, 8
    tokens, masked, editable, _, _ = random_case(rng, rows, length)
    thresholds = rng.choice(np.float32([0.0, 0.25, 0.5, 0.9]), rows)
    algorithm = decoding.BLOCK_ALGORITHMS["LowConfidence"]
    block = make_block(tokens, masked, editable, threshold=thresholds)
    expected = [(tokens[r], masked[r], False) for r in range(rows)]
    for _ in range(length + 1):
        proposed = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
        prob = rng.choice(np.float32([0.1, 0.25, 0.5, 0.75, 1.0]), (rows, length))
        block = algorithm.update(block, make_proposal(proposed, prob))
        for r in range(rows):
            if not expected[r][2]:
                expected[r] = low_confidence_oracle(
                    *expected[r][:2], proposed[r], prob[r], thresholds[r]
                )
            np.testing.assert_array_equal(block.tokens[r], expected[r][0])
            np.testing.assert_array_equal(block.masked[r], expected[r][1])
            assert bool(block.done[r]) == expected[r][2]
    assert np.all(block.done), "a block of T positions ends within T + 1 steps"


@pytest.mark.parametrize("seed", range(30))
def test_joint_threshold_equals_the_oracle_for_a_whole_block(seed):
    rng = np.random.default_rng(1000 + seed)
    rows, length, budget = 5, 6, int(rng.integers(0, 5))
    tokens, masked, editable, _, _ = random_case(rng, rows, length)
    thresholds = rng.choice(np.float32([0.0, 0.25, 0.5, 0.9]), rows)
    edits = rng.choice(np.float32([0.0, 0.5, 1.0]), rows)
    algorithm = decoding.BLOCK_ALGORITHMS["JointThreshold"]
    block = make_block(
        tokens,
        masked,
        editable,
        threshold=thresholds,
        edit_threshold=edits,
        max_post_edit_steps=budget,
        extra=algorithm.init_extra(rows, length),
    )
    expected = [
        {
            "tokens": tokens[r].copy(),
            "masked": masked[r].copy(),
            "editable": editable[r],
            "done": False,
            "post": 0,
        }
        for r in range(rows)
    ]
    for _ in range(length + budget + 1):
        proposed = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
        prob = rng.choice(np.float32([0.1, 0.25, 0.5, 0.75, 1.0]), (rows, length))
        block = algorithm.update(block, make_proposal(proposed, prob))
        for r, row in enumerate(expected):
            joint_threshold_oracle(
                row,
                proposed[r],
                prob[r],
                threshold=thresholds[r],
                edit_threshold=edits[r],
                budget=budget,
            )
            np.testing.assert_array_equal(block.tokens[r], row["tokens"])
            np.testing.assert_array_equal(block.masked[r], row["masked"])
            assert bool(block.done[r]) == row["done"]
    assert np.all(block.done), "oscillating edits end by the budget"


def one_row(tokens, masked, editable=None):
    tokens, masked = np.int32([tokens]), np.array([masked], bool)
    return tokens, masked, np.ones_like(masked) if editable is None else np.array([editable], bool)


def test_confidence_equal_to_the_threshold_is_not_accepted():
    block = make_block(*one_row([0, 0], [True, True]), threshold=0.5)
    after = decoding.BLOCK_ALGORITHMS["LowConfidence"].update(
        block, make_proposal(np.int32([[3, 4]]), np.float32([[0.5, 0.75]]))
    )
    assert after.tokens.tolist() == [[0, 4]]
    assert after.masked.tolist() == [[True, False]]


def test_without_a_confident_position_the_lowest_best_one_is_written():
    block = make_block(*one_row([0, 0, 0], [True, True, True]), threshold=0.9)
    after = decoding.BLOCK_ALGORITHMS["LowConfidence"].update(
        block, make_proposal(np.int32([[3, 4, 5]]), np.float32([[0.2, 0.4, 0.4]]))
    )
    assert after.masked.tolist() == [[True, False, True]]


def test_a_row_without_masks_is_final_before_and_done_after_its_persist_forward():
    algorithm = decoding.BLOCK_ALGORITHMS["LowConfidence"]
    block = make_block(*one_row([1, 2], [False, True]))
    written = algorithm.update(block, make_proposal(np.int32([[5, 6]]), np.float32([[1.0, 1.0]])))
    assert algorithm.is_final(written).tolist() == [True]
    assert written.done.tolist() == [False]
    persisted = algorithm.update(
        written, make_proposal(np.int32([[0, 0]]), np.float32([[1.0, 1.0]]))
    )
    assert persisted.tokens.tolist() == [[1, 6]]
    assert persisted.done.tolist() == [True]


def test_prompt_tokens_are_never_edited_and_masks_and_edits_share_a_step():
    algorithm = decoding.BLOCK_ALGORITHMS["JointThreshold"]
    block = make_block(
        *one_row([1, 2, 0], [False, False, True], [False, True, True]),
        extra=algorithm.init_extra(1, 3),
    )
    after = algorithm.update(block, make_proposal(np.int32([[4, 5, 6]]), np.float32([[0.9] * 3])))
    assert after.tokens.tolist() == [[1, 5, 6]]
    assert after.done.tolist() == [False]
    closing = algorithm.update(after, make_proposal(np.int32([[4, 5, 6]]), np.float32([[0.9] * 3])))
    assert closing.done.tolist() == [True], "the step without a change is the persist forward"


def test_edit_threshold_one_disables_edits():
    algorithm = decoding.BLOCK_ALGORITHMS["JointThreshold"]
    block = make_block(
        *one_row([1, 2], [False, False]), edit_threshold=1.0, extra=algorithm.init_extra(1, 2)
    )
    after = algorithm.update(block, make_proposal(np.int32([[4, 5]]), np.float32([[1.0, 1.0]])))
    assert after.tokens.tolist() == [[1, 2]]
    assert after.done.tolist() == [True]


def test_sixteen_edit_steps_then_the_seventeenth_ends_the_row():
    algorithm = decoding.BLOCK_ALGORITHMS["JointThreshold"]
    block = make_block(*one_row([1], [False]), extra=algorithm.init_extra(1, 1))
    steps = 0
    while not bool(block.done[0]):
        other = np.int32([[2 if int(block.tokens[0, 0]) == 1 else 1]])  # oscillates for ever
        block = algorithm.update(block, make_proposal(other, np.float32([[0.9]])))
        steps += 1
    assert steps == 17
    assert block.tokens.tolist() == [[1]], "sixteen flips end where they began"


def test_drawn_tokens_are_not_reverted_by_edits():
    algorithm = decoding.BLOCK_ALGORITHMS["JointThreshold"]
    block = make_block(*one_row([0], [True]), extra=algorithm.init_extra(1, 1))
    drawn = make_proposal(
        np.int32([[3]]), np.float32([[0.9]]), best=np.int32([[5]]), is_drawn=np.array([True])
    )
    block = algorithm.update(block, drawn)
    assert block.tokens.tolist() == [[3]]
    block = algorithm.update(block, drawn)
    assert block.tokens.tolist() == [[3]] and block.done.tolist() == [True]


@pytest.mark.parametrize(
    "name",
    # Rules that move tokens have oracles of their own.
    [name for name in decoding.BLOCK_ALGORITHMS if not lookup.TABLE[name].moves_tokens],
)
def test_finished_rows_are_unchanged(name):
    rng = np.random.default_rng(5)
    tokens, masked, editable, proposed, prob = random_case(rng, 4, 6)
    algorithm = decoding.BLOCK_ALGORITHMS[name]
    done = np.array([True, False, True, False])
    block = make_block(tokens, masked, editable, extra=algorithm.init_extra(4, 6), done=done)
    after = algorithm.update(block, make_proposal(proposed, prob))
    np.testing.assert_array_equal(after.tokens[::2], tokens[::2])
    np.testing.assert_array_equal(after.masked[::2], masked[::2])
    assert np.all(np.asarray(after.done)[::2])
