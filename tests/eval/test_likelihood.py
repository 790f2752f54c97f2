"""The Monte-Carlo likelihood against the mean over all orders of writing, token by token."""

import functools
import itertools
import pathlib
import types
import zlib

import jax
import numpy as np
import pytest

from jdllm import errors, spec
from jdllm.eval import likelihood
from jdllm.runner import full_forward

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"
MASK, BLOCK = 99, 4
ATOL = 1e-4  # float32 log-probabilities of a few tokens, summed
STANDARD_ERRORS = 4


def about(pattern, **changes):
    diffusion = spec.DiffusionSpec(
        **{"block_size": BLOCK, "mask_token_id": MASK, "eos_token_ids": (1,)}
        | {"attention_pattern": spec.AttentionPattern(pattern)}
        | changes
    )
    return types.SimpleNamespace(
        diffusion=diffusion, architecture="Toy", max_position_embeddings=40
    )


class HashModel:
    """Each place's distribution over 3 tokens is a hash of all that it may see."""

    def __init__(self, pattern="full"):
        self.spec = about(pattern)

    def logprobs(self, ids, position):
        diffusion = self.spec.diffusion
        is_full = diffusion.attention_pattern is spec.AttentionPattern.FULL
        end = len(ids) if is_full else (position // BLOCK + 1) * BLOCK
        logits = [
            zlib.crc32(repr((list(ids[:end]), position, v)).encode()) / 2**31 for v in (0, 1, 2)
        ]
        return np.array(logits) - np.log(np.exp(logits).sum())

    def token_scores(self, ids, lengths, positions, tokens):
        rows = [
            [self.logprobs(row[:length].tolist(), place) for place in places]
            for row, length, places in zip(ids, lengths, positions.tolist(), strict=True)
        ]
        all_logprobs = np.array(rows)
        return full_forward.TokenScores(
            logprob=np.take_along_axis(all_logprobs, tokens[..., None], -1)[..., 0],
            best_id=all_logprobs.argmax(-1),
            best_logprob=all_logprobs.max(-1),
        )


def mean_over_orders(logprobs, context, target, padding=0, mask=MASK):
    """The definition: write the target in every order, one token at a time."""
    start, totals = len(context), []
    for order in itertools.permutations(range(len(target))):
        ids = [*context, *[mask] * (len(target) + padding)]
        total = 0.0
        for i in order:
            total += logprobs(ids, start + i)[target[i]]
            ids[start + i] = target[i]
        totals.append(total)
    return np.mean(totals)


def score(model, pairs, **options):
    options = {"num_samples": 128, "checks_greedy": False} | options
    return [one.logprob for one in likelihood.Likelihood(model, **options).score(pairs)]


def test_all_masks_of_a_short_target_give_the_mean_over_all_orders():
    model = HashModel()
    for context, target in (([5, 6], [0, 2, 1]), ([], [1, 1, 0, 2]), ([7], [2])):
        (got,) = score(model, [(context, target)])
        assert got == pytest.approx(mean_over_orders(model.logprobs, context, target), abs=1e-9)


def test_block_causal_scores_block_after_block_given_the_blocks_before():
    model = HashModel("block_causal")
    context, target = [5, 6, 7], [0, 2, 1, 1, 0, 2, 1]  # blocks: 567|0  2110  21..
    expected = sum(
        mean_over_orders(model.logprobs, [*context, *target[:a]], target[a:b], padding)
        for a, b, padding in ((0, 1, 0), (1, 5, 0), (5, 7, 2))
    )
    (got,) = score(model, [(context, target)])
    assert got == pytest.approx(expected, abs=1e-9)


def test_the_sampled_estimate_is_unbiased():
    model = HashModel()
    context, target = [5, 6], [0, 2, 1, 1, 0]
    expected = mean_over_orders(model.logprobs, context, target)
    got = [score(model, [(context, target)], num_samples=4, seed=seed)[0] for seed in range(200)]
    error = np.std(got) / np.sqrt(len(got))
    assert error > 0
    assert abs(np.mean(got) - expected) < STANDARD_ERRORS * error


def test_more_samples_come_closer():
    model = HashModel()
    pair, expected = (
        ([5], [0, 2, 1, 1, 0]),
        mean_over_orders(HashModel().logprobs, [5], [0, 2, 1, 1, 0]),
    )
    errors_of = {
        n: np.std(
            [score(model, [pair], num_samples=n, seed=seed)[0] - expected for seed in range(60)]
        )
        for n in (2, 16)
    }
    assert errors_of[16] < errors_of[2] / 2


def test_draws_depend_on_seed_context_and_length_alone():
    one, _ = likelihood.draw_masks(9, 16, 3, np.array([1, 2], np.int32))
    again, weights = likelihood.draw_masks(9, 16, 3, np.array([1, 2], np.int64))
    np.testing.assert_array_equal(one, again)
    assert one.any(axis=1).all()
    np.testing.assert_allclose(weights, 9 / (16 * one.sum(axis=1)))
    for seed, before in ((4, [1, 2]), (3, [1, 3]), (3, [])):
        other, _ = likelihood.draw_masks(9, 16, seed, np.array(before, np.int32))
        assert (one != other).any()


def test_the_number_of_masked_tokens_is_uniform():
    sizes = [
        likelihood.draw_masks(5, 8, seed, np.zeros(1, np.int32))[0].sum(axis=1)
        for seed in range(500)
    ]
    counts = np.bincount(np.concatenate(sizes), minlength=6)[1:]
    assert counts.sum() == 4000
    np.testing.assert_allclose(counts / 4000, 1 / 5, atol=0.02)


@pytest.mark.parametrize(
    ("length", "samples", "count"), [(7, 128, 127), (8, 128, 128), (1, 1, 1), (300, 2, 2)]
)
def test_masks_are_enumerated_if_that_is_cheaper(length, samples, count):
    masks, weights = likelihood.draw_masks(length, samples, 0, np.zeros(0, np.int32))
    assert len(masks) == len(weights) == count == likelihood.num_masks(length, samples)
    if count == 2**length - 1:
        assert len({tuple(mask) for mask in masks.tolist()}) == count


def written_greedily(model, context, length):
    """Writes the most probable token of all masked places, one by one, from the definition."""
    ids = [*context, *[MASK] * length]
    while MASK in ids:
        best = {i: model.logprobs(ids, i) for i, token in enumerate(ids) if token == MASK}
        place = max(best, key=lambda i: best[i].max())
        ids[place] = int(best[place].argmax())
    return ids[len(context) :]


def test_is_greedy_says_whether_greedy_decoding_writes_the_target():
    model, context = HashModel(), [5, 6]
    right = written_greedily(model, context, 4)
    pairs = [(context, list(target)) for target in itertools.product((0, 1, 2), repeat=4)]
    scores = likelihood.Likelihood(model, num_samples=1).score(pairs)
    assert [target for (_, target), one in zip(pairs, scores, strict=True) if one.is_greedy] == [
        right
    ]


def test_is_greedy_goes_block_by_block():
    model, context = HashModel("block_causal"), [5, 6, 7]
    first = written_greedily(model, context, 1)
    target = [*first, *written_greedily(model, [*context, *first], BLOCK)]
    wrong = [*target[:-1], (target[-1] + 1) % 3]
    scores = likelihood.Likelihood(model, num_samples=1).score(
        [(context, target), (context, wrong)]
    )
    assert [one.is_greedy for one in scores] == [True, False]


@functools.cache
def golden_model(family):
    with jax.default_matmul_precision("highest"):
        return full_forward.load_model(
            GOLDENS / family, dtype="float32", block_size=8 if family == "llada2" else None
        )


@pytest.mark.parametrize("family", ["llada", "dream", "llada2"])
def test_a_real_model_gives_the_mean_over_all_orders(family):
    model = golden_model(family)
    diffusion = model.spec.diffusion
    ids = np.load(GOLDENS / family / "inputs.npy")[0].tolist()
    context, target = ids[:9], ids[9:12]
    padding = 0 if family != "llada2" else 4  # to the end of the block of 8

    def logprobs(row, position):
        logits = model.logits([row])[0, position - diffusion.is_shifted]
        return np.asarray(jax.nn.log_softmax(logits))

    expected = mean_over_orders(logprobs, context, target, padding, diffusion.mask_token_id)
    (got,) = score(model, [(context, target)])
    assert got == pytest.approx(expected, abs=ATOL)


@pytest.mark.parametrize("family", ["llada", "llada2"])
def test_a_score_does_not_depend_on_other_requests(family):
    model = golden_model(family)
    ids = np.load(GOLDENS / family / "inputs.npy")[1].tolist()
    pairs = [(ids[:5], ids[5:14]), (ids[:3], ids[3:4]), (ids[:20], ids[20:24]), ([], ids[:9])]
    options = {"num_samples": 12, "seed": 1, "checks_greedy": True}
    together = score(model, pairs, **options)
    assert score(model, pairs[::-1], **options) == together[::-1]
    assert [score(model, [pair], **options)[0] for pair in pairs] == together
    assert score(model, pairs, **options | {"seed": 2}) != together


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(NotImplementedError, match="no mask token"):
        likelihood.Likelihood(types.SimpleNamespace(spec=about("full", mask_token_id=None)))
    with pytest.raises(errors.ConfigError, match="num_samples=0"):
        likelihood.Likelihood(HashModel(), num_samples=0)
    with pytest.raises(errors.ConfigError, match="seed=-1"):
        likelihood.Likelihood(HashModel(), seed=-1)
    with pytest.raises(errors.RequestTooLong, match="41 tokens; the model holds 40"):
        score(HashModel(), [([1] * 40, [1])])
    shifted = HashModel()
    shifted.spec = about("full", logit_alignment=spec.LogitAlignment.SHIFTED)
    with pytest.raises(errors.RequestError, match="needs a token before"):
        score(shifted, [([], [1])])
    assert score(HashModel(), [([1], [])]) == [0.0]
