"""Spoiled questions and dropout: what they may change, and that evaluation has neither."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import errors
from jdllm.train import config, dropout, evaluate, examples, question_noise, step

NANO = pathlib.Path(examples.__file__).parents[1] / "assets" / "jdllm-nano"
CANVAS = NANO.with_name("jdllm-nano-canvas")
SMALL = {
    NANO: {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    CANVAS: {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 64},
}
CHAT = examples.ChatFormat(NANO)
LAYOUT = examples.Layout(sequence_length=160, block_size=32, answer_blocks=4)
VOCAB, MASK = 1536, 2


def settings(model=NANO, **changes):
    values = {"model_path": str(model), "compute_dtype": "float32", "eval_problems": 4}
    return config.from_mapping(values | {"eval_thresholds": []} | changes)


def noise(share):
    options = settings(question_noise_words=share)
    return question_noise.of_chat(CHAT, options, vocab_size=VOCAB, mask_token_id=MASK)


@pytest.fixture(scope="module")
def batch():
    return examples.heldout(CHAT, LAYOUT, 64)[1]


def network_of(model):
    hf = json.loads((model / "config.json").read_text()) | SMALL[model]
    return step.build_network(hf, "float32")


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_only_words_of_questions_are_spoiled(batch, share):
    spoiled, _ = question_noise.spoil(jax.random.key(0), batch, noise(share))
    tokens, changed = np.asarray(batch["tokens"]), np.asarray(spoiled["tokens"])
    before, after = CHAT.prompts([""])[0], CHAT.prompts(["7"])[0]
    rate = []
    for row, prompt in enumerate(batch["prompt_lens"]):
        differs = tokens[row] != changed[row]
        assert not differs[prompt:].any()
        # The template: "<role>HUMAN</role>", then the end of the turn and the assistant's role.
        head = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        assert (
            not differs[:head].any() and not differs[prompt - (len(before) - head) : prompt].any()
        )
        for token in tokens[row][differs]:
            assert not any(c.isdigit() for c in CHAT.decode([token]))
        rate.append(differs.mean() * 160 / prompt)
    assert 0.4 * share < np.mean(rate) < share
    assert set(changed[tokens != changed]) & {MASK}


def test_targets_are_the_clean_tokens_of_spoiled_places(batch):
    spoiled, targets = question_noise.spoil(jax.random.key(1), batch, noise(0.1))
    tokens, changed = np.asarray(batch["tokens"]), np.asarray(spoiled["tokens"])
    places, weights = np.asarray(targets.places), np.asarray(targets.weights)
    assert np.array_equal(np.asarray(targets.tokens), np.take_along_axis(tokens, places, axis=1))
    assert weights.sum() > 0 and set(np.unique(weights)) <= {0.0, 1.0}
    for row in range(len(tokens)):
        guessed = set(places[row][weights[row] > 0])
        differs = set(np.flatnonzero(tokens[row] != changed[row]))
        assert differs <= guessed or len(guessed) == question_noise.MAX_TARGETS


def test_without_a_share_there_is_no_noise():
    options = settings()
    assert question_noise.of_chat(CHAT, options, vocab_size=VOCAB, mask_token_id=MASK) is None


@pytest.mark.parametrize(
    "model", [pytest.param(NANO, marks=pytest.mark.campaign), CANVAS], ids=["block", "canvas"]
)
def test_the_question_loss_is_that_of_the_spoiled_tokens(model, batch):
    network = network_of(model)
    params = step.init_params(network, 0)
    few = {key: array[:3] for key, array in batch.items()}
    spoiled, targets = question_noise.spoil(jax.random.key(2), few, noise(0.2))
    options = settings(model)
    noisy = step.noisy_batch(jax.random.key(3), spoiled, step.noise_config(network, options))
    plain, _ = step.loss(network, params, noisy)
    noisy = step.dataclasses.replace(noisy, question=targets)
    assert step.loss(network, params, noisy)[0] == plain
    both = step.loss(network, params, noisy, question_loss=0.5)[0]
    logits, _ = step.forward(network, network.cast(params), noisy)
    guesses = np.asarray(logits)[noisy.targets.size :].reshape(3, -1, VOCAB)
    losses = []
    for row, column in np.argwhere(np.asarray(targets.weights) > 0):
        row_logits = guesses[row, column].astype(np.float64)
        shift = row_logits - row_logits.max()
        chances = np.exp(shift) / np.exp(shift).sum()
        losses.append(-np.log(chances[int(targets.tokens[row, column])]))
    assert float(both - plain) == pytest.approx(0.5 * np.mean(losses), rel=1e-3)


def test_dropout_keeps_the_mean_and_draws_anew():
    drop = dropout.Dropout(0.25, jax.random.key(0))
    x = jnp.ones((400, 100))
    one, other = np.asarray(drop(x)), np.asarray(drop(x))
    assert (one == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert one.mean() == pytest.approx(1, abs=0.01)
    assert np.array_equal(np.unique(one), np.float32([0, 256 / 192]))
    assert (one != other).mean() > 0.3


@pytest.mark.campaign
@pytest.mark.parametrize("model", [NANO, CANVAS], ids=["block", "canvas"])
def test_training_noise_changes_training_but_not_evaluation(model, batch):
    network = network_of(model)
    few = {key: array[:4] for key, array in batch.items()}
    losses, evaluated = [], []
    noises = {"dropout": 0.1, "question_noise_words": 0.1, "question_loss": 0.1}
    for changes in ({}, noises):
        options = settings(model, **changes)
        kinds = step.noise_config(network, options)
        spoils = question_noise.of_chat(CHAT, options, vocab_size=VOCAB, mask_token_id=MASK)
        params = step.init_params(network, 0)
        evaluator = evaluate.evaluator(network, options, CHAT, LAYOUT, kinds)
        evaluated.append(evaluator(params))
        state = step.init_state(options, params, average=params, step=0)
        _, metrics = step.train_step(network, options, kinds, spoils)(state, few, np.float32(1e-3))
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
    assert evaluated[0] == evaluated[1]
    assert any(name.startswith("accuracy_written_new") for name in evaluated[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reworded": 1.5}, "reworded=1.5 must be from 0 to 1"),
        ({"dropout": 0.95}, "dropout=0.95 must be at most 0.9"),
        ({"question_loss": 0.1}, "needs question_noise_words"),
        ({"noise_blocks": 5}, "noise_blocks=5 must be from 0 to answer_blocks=4"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(errors.ConfigError, match=message):
        settings(**changes)
