"""Streamed text: deltas never retract, join to the final text, and respect stop strings."""

import functools
import random
import time

import pytest

from jdllm.checkpoint import source
from jdllm.engine import detokenizer, prefix_match, tokenizer
from jdllm.options import sampling_params
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


def naive_size(stop, text):
    """Returns the length of the longest proper prefix of `stop` that `text` ends with."""
    return max((size for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_a_prefix_match_agrees_with_trying_every_size(seed):
    rng = random.Random(seed)
    for _ in range(40):
        letters = "ab" if rng.random() < 0.7 else "abc\N{GRINNING FACE}"
        stop = "".join(rng.choices(letters, k=rng.randint(1, 9)))
        match, text = prefix_match.PrefixMatch(stop), ""
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.05:
                match.reset()
                text = ""
            more = rng.choice([stop, "".join(rng.choices(letters, k=rng.randint(0, 6)))])
            match.feed(more)
            text += more
            assert match.size == naive_size(stop, text)


class OneLetterTokenizer:
    """Token i is the letter chr(i); what follows a 0 is not known to be whole yet."""

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(chr(i) if i else detokenizer.REPLACEMENT for i in ids)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_back_agrees_with_trying_every_size(seed):
    """Also where the end of the text is replaced by the next tokens."""
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
    params = sampling_params.SamplingParams(stop=stops)
    incremental, ids, shown = detokenizer.Detokenizer(OneLetterTokenizer(), params), [], ""
    for _ in range(40):
        while ids and ids[-1] == 0:
            ids.pop()
        ids += [ord(letter) for letter in rng.choices("ab", k=rng.randint(1, 4))]
        ids += [0] * rng.choice([0, 0, 1, 2])
        text = OneLetterTokenizer().decode(ids)
        settled = text.rstrip(detokenizer.REPLACEMENT)
        certain = settled[: len(settled) - max(naive_size(stop, settled) for stop in stops)]
        incremental.update(ids, None)
        shown += certain[len(shown) :]
        assert incremental.text == shown


def test_a_stop_string_of_a_megabyte_costs_no_more_than_the_text():
    """It took minutes: each of its prefixes was compared with the end of the text."""
    params = sampling_params.SamplingParams()
    object.__setattr__(params, "stop", ("a" * 2**20 + "b", "ab" * 2**19))
    incremental = detokenizer.Detokenizer(OneLetterTokenizer(), params)
    began = time.monotonic()
    for size in range(100, 2000, 100):
        assert incremental.update([ord("a")] * size, None) == ""
    assert time.monotonic() - began < 2.0
    assert incremental.update([ord("a")] * 2000 + [ord("c")], None) == "a" * 2000 + "c"


def test_a_character_of_several_tokens_has_its_text_once():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    data = "a\u00e9\u20acb".encode()
    texts = detokenizer.texts_of_positions(list(data), decode)
    assert texts == ["a", "\u00e9\u20ac", "", "", "", "", "b"]
    assert detokenizer.texts_of_positions([data[1], None, data[3]], decode)[1] == ""
