"""Canvas rows with penalties, biases, bans and lists of the best tokens, against a slow oracle."""

import dataclasses

import numpy as np
import pytest
from support import logit_oracle
from support.canvas_asks import DUAL, FAST, MULTI, SLOW, WINDOW, Ask, mixed_asks
from support.canvas_engine import (
    ATOL,
    alone,
    decoded,
    generate,
    launches,
    logprobs,
    shared,
    told,
)
from support.tiny_engine import assert_nothing_held

from jdllm import errors

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

# The second family, whose logits are shifted, is part of the campaign.
every_family = pytest.mark.parametrize(
    "family", ["llada", pytest.param("dream", marks=pytest.mark.campaign)]
)
MASK = 240
LISTED = {"top_logprobs": 4}
EDITS = {
    "nothing": {},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "encouraged": {"frequency_penalty": -0.7, "repetition_penalty": 0.8},
    "biased": {"logit_bias": {"7": 3.0, "93": 1, "12": -100}},
    "allowed": {"allowed_token_ids": [*range(3, 60)], "presence_penalty": 1.0},
    "minimum": {"min_new_tokens": 9},
    "all": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2,
            "logit_bias": {"11": 1.5}, "min_new_tokens": 5},
}  # fmt: skip
RULES = {
    "llada": [MULTI, WINDOW, SLOW, DUAL, FAST | {"factor": 1.0, "threshold": None}],
    "dream": [MULTI, WINDOW, DUAL, {"algorithm": "Dream", "steps": 7, "alg": "maskgit_plus"}],
}


def edited_asks(family, seed):
    rng = np.random.default_rng(seed)
    for i, more in enumerate(EDITS.values()):
        for dllm in (RULES[family][(i + k) % len(RULES[family])] for k in range(2)):
            ask = Ask(
                prompt=rng.integers(0, MASK, int(rng.integers(2, 14))).tolist(),
                wanted=int(rng.integers(9, 21)),
                dllm=dllm,
                suffix=tuple(rng.integers(0, MASK, 3).tolist() if i % 3 == 1 else []),
                given={4: 17} if i % 4 == 2 else {},
            )
            ends = ()
            if "min_new_tokens" in more or i % 4:
                (free,) = generate(shared(family), [ask])  # what it likes to write
                ends = tuple(sorted(set(free["output_ids"]))[:2])
            yield dataclasses.replace(ask, ends=ends, more=more | LISTED)


def oracle(family, ask):
    def edit(logits, position, tokens):
        text = logit_oracle.Text(tokens, len(ask.prompt), ask.end, ask.ends)
        return logit_oracle.edited(logits, text, position, ask.more)

    return decoded(family, ask, edit)


def check(ask, result, expected):
    assert result["output_ids"] == expected.output_ids
    values = logprobs(result)
    for place, best in enumerate(result["meta_info"]["output_top_logprobs"]):
        if place in ask.given:
            assert best == []
            continue
        wanted = expected.logprobs[place]
        assert abs(values[place] - wanted[result["output_ids"][place]]) < ATOL
        got = [(value, token) for value, token, _ in best]
        top = logit_oracle.best_tokens(wanted, 4, MASK)
        np.testing.assert_allclose([v for v, _ in got], [v for _, v in top], atol=ATOL)
        assert all(abs(value - wanted[token]) < ATOL for value, token in got)
        assert len({token for _, token in got}) == len(got) == 4


@every_family
def test_a_batch_of_all_edits_gives_what_the_oracle_says(family):
    """Other rows of the batch ask for nothing, and get what they get alone."""
    asks, others = list(edited_asks(family, 1)), mixed_asks(family, seed=3)
    single = alone(shared(family), others)
    before = shared(family).stats().jit_compiles_total
    results = generate(shared(family), others[:4] + asks + others[4:])
    assert shared(family).stats().jit_compiles_total == before
    mixed = results[:4] + results[4 + len(asks) :]
    assert told(mixed) == told(single)
    for ask, result in zip(asks, results[4:], strict=False):
        check(ask, result, oracle(family, ask))
    assert_nothing_held(shared(family))


@every_family
def test_how_launches_are_cut_changes_nothing(family):
    asks = list(edited_asks(family, 2))
    expected = generate(shared(family), asks)
    with launches(shared(family), steps=1, overlaps=True):
        assert told(generate(shared(family), asks)) == told(expected)
    assert told(alone(shared(family), asks[:6])) == told(expected[:6])


@every_family
def test_lists_change_no_token(family):
    asks = mixed_asks(family, seed=4)
    listed = [dataclasses.replace(ask, more=LISTED) for ask in asks]
    assert told(generate(shared(family), listed)) == told(generate(shared(family), asks))


@every_family
def test_draws_keep_to_the_edited_logits(family):
    """An edit of nothing draws the same tokens; a ban keeps them out; min_p 1 is greedy."""
    dllm = RULES[family][0] if family == "llada" else RULES[family][-1]
    plain = Ask(prompt=[5, 6, 7], wanted=16, dllm=dllm, temperature=4.0, seed=4)

    def ids(**changes):
        (result,) = generate(shared(family), [dataclasses.replace(plain, **changes)])
        return result["output_ids"]

    assert ids() != ids(temperature=0.0)
    assert ids(more={"logit_bias": {"7": 0.0}}) == ids(more={"min_p": 1e-9}) == ids()
    if dllm["algorithm"] != "Dream":  # whose measures are those of the tempered distribution
        assert ids(more={"min_p": 1.0}) == ids(temperature=0.0)
    assert set(ids(more={"allowed_token_ids": [3, 4, 5]})) <= {3, 4, 5}


def test_bad_words_are_never_written():
    engine, tokenizer = shared("llada"), shared("llada").tokenizer
    ask = Ask(prompt=[5, 6, 7], wanted=16, dllm=MULTI)
    (before,) = generate(engine, [ask])
    words = [tokenizer.decode([token]) for token in set(before["output_ids"])]
    (after,) = generate(engine, [dataclasses.replace(ask, more={"bad_words": words})])
    assert not set(after["output_ids"]) & set(before["output_ids"])
    two = tokenizer.decode([30, 31])
    with pytest.raises(errors.RequestError, match="several tokens") as raised:
        generate(engine, [dataclasses.replace(ask, more={"bad_words": [two]})])
    assert raised.value.param == "bad_words"
