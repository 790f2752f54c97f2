"""The rules of SDAR, MaskedDiffusion, HierarchyBlock and LinearSpec against numpy loops."""

import math

import numpy as np
import pytest
from support.blocks import make_block, make_proposal

from jdllm import decoding, errors
from jdllm.algorithms import lookup
from jdllm.options.sampling_params import DllmParams

VOCAB, LENGTH, ROWS = 9, 8, 6
STRATEGIES = lookup.TABLE["SDAR"].option("remasking_strategy").words
POLICIES = lookup.TABLE["MaskedDiffusion"].option("selection_policy").words


def statistics(logits):
    """Returns (token, probability, entropy) of one position, in float64."""
    z = logits.astype(np.float64)
    p = np.exp(z - z.max())
    p /= p.sum()
    return int(np.argmax(z)), p.max(), -np.sum(p * np.log(p))


def by(score, masked):
    """Returns the masked positions by falling score, then by rising position."""
    return sorted(np.flatnonzero(masked), key=lambda i: (-score[i], i))


def sdar_oracle(masked, prob, entropy, step, options):
    """Returns the positions that a step of one row writes."""
    steps = min(options["denoising_steps"] or LENGTH, LENGTH)
    share = LENGTH // steps + (step < LENGTH % steps)
    match options["remasking_strategy"]:
        case "sequential":
            return list(np.flatnonzero(masked)[:share])
        case "low_confidence_static":
            return by(prob, masked)[:share]
        case "low_confidence_dynamic":
            confident = [i for i in np.flatnonzero(masked) if prob[i] > options["threshold"]]
            return confident if len(confident) >= share else by(prob, masked)[:share]
    chosen, total = [], 0.0
    for i in by(-entropy, masked):
        total += entropy[i]
        if chosen and total > options["eb_threshold"]:
            break
        chosen.append(i)
    return chosen


def masked_diffusion_oracle(masked, prob, entropy, step, options):
    del entropy
    steps = min(options["max_denoising_steps"] or LENGTH, LENGTH)
    if step >= steps - 1:
        return list(np.flatnonzero(masked))
    share = math.ceil(masked.sum() / (steps - step))
    match options["selection_policy"]:
        case "leftmost":
            return list(np.flatnonzero(masked)[:share])
        case "low_confidence":
            return by(prob, masked)[:share]
    best = by(prob, masked)[0]
    return [i for i in np.flatnonzero(masked) if prob[i] >= options["threshold"] or i == best]


def hierarchy_oracle(masked, prob, entropy, step, options):
    del entropy, step
    size = options["small_block_size"]
    for first in range(0, LENGTH, size):
        found = [i for i in range(first, min(first + size, LENGTH)) if masked[i]]
        if found:
            sure = [i for i in found if prob[i] > options["threshold"]]
            return sure or [by(prob, masked & np.isin(np.arange(LENGTH), found))[0]]
    return []


def linear_spec_oracle(masked, prob, entropy, step, options):
    del entropy, step
    sure = [i for i in np.flatnonzero(masked) if prob[i] >= options["threshold"]]
    return sure or by(prob, masked)[:1]


def random_options(rng, name):
    if name == "LinearSpec":
        return {"threshold": rng.choice([0.0, 0.2, 0.4, 0.7])}
    if name == "HierarchyBlock":
        return {
            "threshold": rng.choice([0.2, 0.4, 0.7]),
            "small_block_size": int(rng.choice([1, 2, 3, 4, 5, 8])),
        }
    if name == "SDAR":
        return {
            "remasking_strategy": str(rng.choice(STRATEGIES)),
            "threshold": rng.choice([0.2, 0.4, 0.7]),
            "denoising_steps": int(rng.choice([0, 1, 2, 3, 5, 8, 20])),
            "eb_threshold": rng.choice([0.0, 1.5, 4.0]),
        }
    return {
        "selection_policy": str(rng.choice(POLICIES)),
        "threshold": rng.choice([0.2, 0.4, 0.7]),
        "max_denoising_steps": int(rng.choice([0, 1, 2, 3, 5, 8, 20])),
    }


def arrays_of(name, rows):
    words = {"SDAR": "remasking_strategy", "MaskedDiffusion": "selection_policy"}
    arrays = {option: [row[option] for row in rows] for option in rows[0]}
    if name in words:
        word = words[name]
        arrays[word] = [lookup.word(name, word, value) for value in arrays[word]]
    return arrays


ORACLES = {
    "SDAR": sdar_oracle,
    "MaskedDiffusion": masked_diffusion_oracle,
    "HierarchyBlock": hierarchy_oracle,
    "LinearSpec": linear_spec_oracle,
}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", ORACLES)
def test_a_rule_equals_its_oracle_for_a_whole_block(name, seed):
    rng = np.random.default_rng(seed)
    options = [random_options(rng, name) for _ in range(ROWS)]
    masked = np.ones((ROWS, LENGTH), bool)
    for row in masked:
        row[: rng.integers(0, LENGTH)] = False  # the prompt's tail
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    algorithm = decoding.BLOCK_ALGORITHMS[name]
    block = make_block(
        tokens,
        masked,
        masked.copy(),
        extra=algorithm.init_extra(ROWS, LENGTH),
        **arrays_of(name, options),
    )
    for step in range(LENGTH + 1):
        logits = rng.normal(size=(ROWS, LENGTH, VOCAB)) * rng.choice([0.5, 3.0])
        found = [[statistics(position) for position in row] for row in logits]
        token, prob, entropy = (np.array(one) for one in np.moveaxis(np.array(found), 2, 0))
        prob[:, 1] = prob[:, 0]  # a tie in every row
        token, expected_done = token.astype(np.int32), ~masked.any(axis=1)
        read = np.asarray(algorithm.reads(block))
        block = algorithm.update(
            block,
            make_proposal(token, prob.astype(np.float32), entropy=entropy.astype(np.float32)),
        )
        assert not (read & ~masked).any()
        assert not (masked & ~np.asarray(block.masked) & ~read).any(), "written, but not read"
        for r in range(ROWS):
            if masked[r].any():
                where = ORACLES[name](masked[r], prob[r], entropy[r], step, options[r])
                tokens[r, where], masked[r, where] = token[r, where], False
        np.testing.assert_array_equal(block.tokens, tokens, err_msg=f"{step=} {options}")
        np.testing.assert_array_equal(block.masked, masked, err_msg=f"{step=} {options}")
        np.testing.assert_array_equal(block.done, expected_done)
    assert np.all(block.done), "a block of T positions ends within T + 1 steps"


def one_step(name, masked, prob, **options):
    masked = np.array([masked])
    algorithm = decoding.BLOCK_ALGORITHMS[name]
    tokens = np.full(masked.shape, 3, np.int32)
    block = make_block(
        np.zeros_like(tokens), masked, masked, extra=algorithm.init_extra(1, 0), **options
    )
    after = algorithm.update(block, make_proposal(tokens, np.float32([prob])))
    return np.flatnonzero(np.asarray(after.tokens)[0] == 3).tolist()


def test_a_step_of_sdar_never_writes_more_than_the_masks():
    # The published code ranks all positions and takes n of them, masked or not.
    static = lookup.word("SDAR", "remasking_strategy", "low_confidence_static")
    options = {"remasking_strategy": static, "denoising_steps": 1}
    assert one_step("SDAR", [False, False, False, True], [0.9] * 4, **options) == [3]
    sequential = lookup.word("SDAR", "remasking_strategy", "sequential")
    options = {"remasking_strategy": sequential, "denoising_steps": 2}
    assert one_step("SDAR", [True, False, False, True], [0.9] * 4, **options) == [0, 3]


def test_the_threshold_of_sdar_is_exclusive_and_that_of_masked_diffusion_inclusive():
    prob, masked = [0.5, 0.25, 0.75, 0.5], [True] * 4
    assert one_step("SDAR", masked, prob, threshold=0.5) == [2]
    assert one_step("MaskedDiffusion", masked, prob, threshold=0.5) == [0, 2, 3]


def test_a_drawn_token_counts_by_its_own_probability():
    """SDAR's is that of the filtered distribution, MaskedDiffusion's that at temperature 1."""
    masked, tokens = np.ones((1, 2), bool), np.int32([[5, 6]])
    proposal = make_proposal(
        tokens,
        np.float32([[0.1, 0.1]]),
        draw_prob=np.float32([[1.0, 0.2]]),
        logprob=np.log(np.float32([[0.2, 0.9]])),
    )
    for name, expected in (("SDAR", [5, 0]), ("MaskedDiffusion", [0, 6])):
        algorithm = decoding.BLOCK_ALGORITHMS[name]
        block = make_block(np.zeros_like(tokens), masked, masked, extra=algorithm.init_extra(1, 2))
        assert algorithm.update(block, proposal).tokens.tolist() == [expected]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"remasking_strategy": "sequential", "threshold": 0.5}, "threshold"),
        ({"eb_threshold": 0.5}, "eb_threshold"),
        ({"remasking_strategy": "entropy_bounded", "denoising_steps": 2}, "denoising_steps"),
        ({"algorithm": "MaskedDiffusion", "selection_policy": "leftmost", "threshold": 1.0},
         "threshold"),
    ],
)  # fmt: skip
def test_an_option_without_a_meaning_is_refused_by_name(given, name):
    server = DllmParams(algorithm="SDAR").resolve(DllmParams())
    with pytest.raises(errors.RequestError, match=f"{name} of .* has no meaning with") as raised:
        DllmParams.from_mapping(given).resolve(server)
    assert raised.value.param == f"dllm.{name}"


def test_another_word_takes_its_own_options_and_leaves_the_server_s_others():
    server = DllmParams(algorithm="SDAR", threshold=0.7, denoising_steps=2).resolve(DllmParams())
    bounded = DllmParams(remasking_strategy="entropy_bounded").resolve(server)
    assert bounded.options == {"remasking_strategy": "entropy_bounded", "eb_threshold": 0.35}
    static = DllmParams(remasking_strategy="low_confidence_static").resolve(server)
    assert static.options == {"remasking_strategy": "low_confidence_static", "denoising_steps": 2}
