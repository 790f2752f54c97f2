"""Streamed text: deltas never retract, join to the final text, and respect stop strings."""

import functools
import random

import pytest

from jdllm import sampling_params
from jdllm.checkpoint import source
from jdllm.engine import detokenizer, tokenizer
from jdllm.scheduler import commits, finish

ALPHABET = "ab c\u00e4\u4e2d\U0001f600<|1+="


@pytest.fixture(scope="module")
def nano_tokenizer():
    return tokenizer.Tokenizer(source.bundled_model())


def stream(nano_tokenizer, ids, params, rng):
    """Feeds random-sized blocks as the scheduler would; returns (deltas, cumulative texts)."""
    shown, deltas, texts = 0, [], []
    incremental = detokenizer.Detokenizer(nano_tokenizer, params)
    while True:
        new = min(rng.randint(1, 9), len(ids) - shown)
        shown += new
        reason = finish.check(
            ids[:shown],
            new,
            eos_token_ids=(),
            stop_token_ids=params.stop_token_ids,
            ignore_eos=False,
            stop=params.stop,
            max_new_tokens=len(ids),
            detokenize=functools.partial(nano_tokenizer.decode, skip_special_tokens=False),
        )
        kept = shown if reason is None else reason.finished_len
        deltas.append(incremental.update(ids[:kept], reason))
        texts.append(incremental.text)
        if reason is not None:
            return deltas, texts, reason


@pytest.mark.parametrize("seed", range(40))
def test_deltas_join_to_the_text_cut_at_the_earliest_stop_string(nano_tokenizer, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice(ALPHABET) for _ in range(60))
    stops = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 3))) for _ in range(2)]
    ids = nano_tokenizer.encode(text, add_special_tokens=False)
    params = sampling_params.SamplingParams(stop=stops)
    deltas, texts, reason = stream(nano_tokenizer, ids, params, rng)
    assert "".join(deltas) == texts[-1]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    matches = [text.find(stop) for stop in stops if stop in text]
    if matches:
        # A token may end beyond the first match, so the one that completes first counts.
        assert isinstance(reason.matched, str)
        assert texts[-1] == text[: text.find(reason.matched)]
        assert not any(stop in texts[-1] for stop in stops)
    else:
        assert reason.kind == "length"
        assert texts[-1] == text


def test_an_incomplete_character_is_held_back(nano_tokenizer):
    ids = nano_tokenizer.encode("\U0001f600", add_special_tokens=False)
    assert len(ids) == 4, "one byte per token, so that a block can end inside a character"
    incremental = detokenizer.Detokenizer(nano_tokenizer, sampling_params.SamplingParams())
    assert [incremental.update(ids[:n], None) for n in (1, 2, 3, 4)] == ["", "", "", "\U0001f600"]


def test_a_tail_that_may_begin_a_stop_string_is_held_back(nano_tokenizer):
    params = sampling_params.SamplingParams(stop=["###"])
    incremental = detokenizer.Detokenizer(nano_tokenizer, params)
    ids = nano_tokenizer.encode("ab##", add_special_tokens=False)
    assert incremental.update(ids, None) == "ab"
    more = nano_tokenizer.encode("ab## c", add_special_tokens=False)
    assert incremental.update(more, None) == "## c"


@pytest.mark.parametrize(("no_stop_trim", "expected"), [(False, "1"), (True, "1=")])
def test_stop_tokens_are_trimmed_unless_asked(nano_tokenizer, no_stop_trim, expected):
    ids = nano_tokenizer.encode("1=", add_special_tokens=False)
    params = sampling_params.SamplingParams(stop_token_ids=[ids[-1]], no_stop_trim=no_stop_trim)
    incremental = detokenizer.Detokenizer(nano_tokenizer, params)
    reason = commits.FinishReason(kind="stop", finished_len=2, matched=ids[-1])
    assert incremental.update(ids, reason) == expected


def test_a_skipped_special_token_does_not_move_the_cut(nano_tokenizer):
    special = nano_tokenizer.token_id("<|startoftext|>")
    one = nano_tokenizer.encode("a", add_special_tokens=False) + [special]
    one += nano_tokenizer.encode("b one", add_special_tokens=False)
    two = nano_tokenizer.encode(" two ab", add_special_tokens=False)
    params = sampling_params.SamplingParams(stop=["ab"])
    incremental = detokenizer.Detokenizer(nano_tokenizer, params)
    first = incremental.update(one, None)
    reason = commits.FinishReason(kind="stop", finished_len=len(one + two), matched="ab")
    incremental.update(one + two, reason)
    assert first == "ab one"
    assert incremental.text == "ab one two "
