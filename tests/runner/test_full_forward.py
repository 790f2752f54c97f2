"""Scores of single positions against the whole-sequence logits of the same model."""

import pathlib

import jax
import numpy as np
import pytest

from jdllm import errors
from jdllm.runner import full_forward

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"
ATOL = 1e-4  # float32, sums in another order


@pytest.mark.parametrize("family", ["llada", "dream", "llada2"])
def test_scores_are_those_of_the_logits_and_padding_is_not_seen(family):
    model = full_forward.load_model(GOLDENS / family, dtype="float32")
    ids = np.load(GOLDENS / family / "inputs.npy")[:2]
    lengths, positions = np.array([16, 24]), np.array([[3, 15, 8], [23, 3, 4]])
    tokens = np.array([[7, 1, 2], [5, 5, 0]])
    scores = model.token_scores(ids, lengths, positions, tokens)
    for i, length in enumerate(lengths):
        logits = model.logits(ids[i : i + 1, :length])[0]
        places = positions[i] - model.spec.diffusion.is_shifted
        logprobs = np.asarray(jax.nn.log_softmax(logits))[places]
        np.testing.assert_allclose(scores.logprob[i], logprobs[range(3), tokens[i]], atol=ATOL)
        np.testing.assert_allclose(scores.best_logprob[i], logprobs.max(-1), atol=ATOL)
        np.testing.assert_array_equal(scores.best_id[i], logprobs.argmax(-1))
    other = ids.copy()
    other[0, 16:] = 9
    again = model.token_scores(other, lengths, positions, tokens)
    np.testing.assert_array_equal(again.logprob, scores.logprob)
    with pytest.raises(ValueError, match="length of the row"):
        model.token_scores(ids, np.array([15, 24]), positions, tokens)


def test_an_image_pipeline_is_told_where_it_belongs():
    with pytest.raises(errors.ConfigError, match="is an image pipeline; use jdllm.ImageEngine"):
        full_forward.load_model("jdllm-nano-image")
