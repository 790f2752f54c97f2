"""Finish rules: the specified cases, and random outputs against a token-by-token scan."""

import random
import time

import pytest

from jdllm.scheduler import finish, request

EOS, STOP_ID = 100, 101


def decode(ids):
    """Byte-level tokens: ids below 100 have texts of one to three characters or bytes."""
    return b"".join(TEXT[i] for i in ids).decode("utf-8", errors="replace")


# "é" is two bytes and "𝄞" four, one token per byte; 8 has no text at all.
TEXT = {
    0: b"a",
    1: b"b",
    2: b"ab",
    3: b"\n\n",
    4: "é".encode(),
    5: "é".encode()[:1],
    6: "é".encode()[1:],
    7: b"bab",
    8: b"",
    **{10 + i: "𝄞".encode()[i : i + 1] for i in range(4)},
    EOS: b"<eos>",
    STOP_ID: b"<stop>",
}


def check(output, num_new, **changes):
    options = {
        "eos_token_ids": (EOS,),
        "stop_token_ids": (),
        "ignore_eos": False,
        "stop": (),
        "max_new_tokens": 1000,
        "detokenize": decode,
    } | changes
    return finish.check(output, num_new, **options)


def scan(output, num_new, *, stop=(), stop_token_ids=(), ignore_eos=False, max_new_tokens=1000):
    """Returns (kind, length, matched): the first token after which any rule holds."""
    for length in range(len(output) - num_new + 1, len(output) + 1):
        text = decode(output[:length])
        hits = [(text.index(s), i, s) for i, s in enumerate(stop) if s in text]
        if hits:
            return "stop", length, min(hits)[2]
        last = output[length - 1]
        if last in stop_token_ids or (last == EOS and not ignore_eos):
            return "stop", length, last
        if length == max_new_tokens:
            return "length", length, None
    return None


def triple(reason):
    return None if reason is None else (reason.kind, reason.finished_len, reason.matched)


CASES = {
    "nothing": ([0, 1, 0, 1], 4, {}, None),
    "eos mid block is kept and ends": ([0, 1, EOS, 1], 4, {}, ("stop", 3, EOS)),
    "first of two eos": ([0, EOS, EOS, 1], 4, {}, ("stop", 2, EOS)),
    "ignore_eos": ([0, EOS, 1, 0], 4, {"ignore_eos": True}, None),
    "ignore_eos keeps stop ids": (
        [0, EOS, STOP_ID, 0],
        4,
        {"ignore_eos": True, "stop_token_ids": (STOP_ID,)},
        ("stop", 3, STOP_ID),
    ),
    "eos named as stop id": (
        [0, EOS],
        2,
        {"ignore_eos": True, "stop_token_ids": (EOS,)},
        ("stop", 2, EOS),
    ),
    "stop string across blocks": ([0, 1, 0, 1], 2, {"stop": ("aba",)}, ("stop", 3, "aba")),
    "stop string at equal place": ([0, EOS, 0], 3, {"stop": ("<eos>",)}, ("stop", 2, "<eos>")),
    "stop string before limit": (
        [0, 1, 1],
        3,
        {"stop": ("abb",), "max_new_tokens": 3},
        ("stop", 3, "abb"),
    ),
    "eos before limit": ([0, 1, EOS], 3, {"max_new_tokens": 3}, ("stop", 3, EOS)),
    "stop string beyond max_new": (
        [0, 0, 1, 1],
        4,
        {"stop": ("abb",), "max_new_tokens": 3},
        ("length", 3, None),
    ),
    "eos beyond max_new": ([0, 0, 0, EOS], 4, {"max_new_tokens": 2}, ("length", 2, None)),
    "eos before stop string": ([0, EOS, 3, 0], 4, {"stop": ("\n",)}, ("stop", 2, EOS)),
    "stop string before eos": ([0, 3, EOS, 0], 4, {"stop": ("\n",)}, ("stop", 2, "\n")),
    "earliest string wins, not the first listed": (
        [0, 3, 1, 1],
        4,
        {"stop": ("bb", "\n")},
        ("stop", 2, "\n"),
    ),
    "same token: the earliest in the text": ([7], 1, {"stop": ("ab", "ba")}, ("stop", 1, "ba")),
    "character split over blocks": ([0, 5, 6, 0], 2, {"stop": ("é",)}, ("stop", 3, "é")),
    "four bytes, the last is new": (
        [0, 10, 11, 12, 13],
        1,
        {"stop": ("𝄞",)},
        ("stop", 5, "𝄞"),
    ),
    "max_new below a block": ([0, 1, 0, 1], 4, {"max_new_tokens": 1}, ("length", 1, None)),
    "max_new reached exactly": ([0, 1], 1, {"max_new_tokens": 2}, ("length", 2, None)),
}


@pytest.mark.parametrize("output,num_new,options,expected", CASES.values(), ids=CASES)
def test_case(output, num_new, options, expected):
    assert triple(check(output, num_new, **options)) == expected
    assert scan(output, num_new, **options) == expected


@pytest.mark.parametrize("seed", range(40))
def test_agrees_with_a_scan_over_random_outputs(seed):
    """Feeds blocks until one ends, as the scheduler does."""
    rng = random.Random(seed)
    for _ in range(50):
        options = {
            "stop": tuple(
                rng.choice(["aba", "bb", "éa", "\n\na", "𝄞b", "aaaa", "babab", "<eos>", "ééé"])
                for _ in range(rng.randint(0, 3))
            ),
            "stop_token_ids": rng.choice([(), (STOP_ID,), (EOS,), (3, STOP_ID)]),
            "ignore_eos": rng.random() < 0.3,
            "max_new_tokens": rng.choice([1, 5, 17, 60, 1000]),
        }
        ids = [i for i in TEXT if i < 100 or rng.random() < 0.3]
        block, output = rng.choice([1, 2, 4, 32]), []
        for _ in range(rng.randint(1, 40)):
            new = [rng.choice(ids) for _ in range(rng.randint(1, block))]
            output += new
            expected = scan(output, len(new), **options)
            assert triple(check(output, len(new), **options)) == expected
            if expected is not None:
                break


def test_tokens_without_text_widen_the_window():
    output = [0] + [8] * 300 + [1]
    assert triple(check(output, 1, stop=("ab",))) == ("stop", 302, "ab")


def test_decoding_work_per_block_does_not_grow_with_the_output():
    lengths = []

    def counting(ids):
        lengths.append(len(ids))
        return decode(ids)

    for old in (1000, 100_000):
        lengths.clear()
        assert check([0] * old, 32, stop=("bb",), max_new_tokens=10**6, detokenize=counting) is None
        assert sum(lengths) < 200


def test_the_window_of_long_stop_strings_is_as_long_as_they_are():
    lengths = []

    def counting(ids):
        lengths.append(len(ids))
        return decode(ids)

    stops = ("a" * 2000 + "b", "b" * 2047)
    assert check([0] * 50_000, 32, stop=stops, max_new_tokens=10**6, detokenize=counting) is None
    assert sum(lengths) < 3 * 2047
    output = [1] + [0] * 2000 + [1]
    assert triple(check(output, 1, stop=stops, max_new_tokens=10**6)) == (
        "stop",
        len(output),
        stops[0],
    )


@pytest.mark.parametrize("shape", ["many", "one"])
def test_64_kb_of_stop_strings_are_searched_in_linear_time(shape):
    """Each nearly matches at every place, which took 50 ms and more per block."""
    sizes = [65_536] if shape == "one" else [2048 - i for i in range(32)]
    stops = tuple("a" * (size // 2) + "b" + "a" * (size - size // 2 - 1) for size in sizes)
    output = [0] * 4000
    began = time.monotonic()
    for _ in range(100):
        assert check(output, 32, stop=stops, max_new_tokens=10**6) is None
    assert time.monotonic() - began < 4.0


def test_a_match_in_many_new_tokens_takes_few_decodes():
    counted = []

    def counting(ids):
        counted.append(len(ids))
        return decode(ids)

    output = [0] * 4000 + [1, 1]
    found = check(output, 4002, stop=("bb",), max_new_tokens=10**6, detokenize=counting)
    assert triple(found) == ("stop", 4002, "bb")
    assert len(counted) < 20


def test_the_models_end_tokens_come_before_the_requests():
    assert request.end_tokens([1, 2, EOS], [EOS, 3], False) == (EOS, 3, 1, 2)
    assert request.end_tokens([1, 2], [EOS], True) == (1, 2)


def test_stop_strings_count_behind_the_minimum_only():
    output = [0, 1, 0, 1, 0]  # "ababa"
    for minimum, length in ((0, 2), (1, 4), (2, 4)):
        found = check(output, 5, stop=("ab",), min_new_tokens=minimum)
        assert (found.kind, found.finished_len, found.matched) == ("stop", length, "ab")
    assert check(output, 5, stop=("ab",), min_new_tokens=3) is None
    assert check(output, 2, stop=("ab",), min_new_tokens=9) is None
    found = check(output, 1, stop=("ba",), min_new_tokens=2, max_new_tokens=5)
    assert (found.kind, found.finished_len) == ("stop", 5)
    # End tokens are kept out by the device; one that is given all the same ends the output.
    assert check([0, EOS, 0], 3, min_new_tokens=3).finished_len == 2
