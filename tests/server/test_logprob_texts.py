"""The tokens of OpenAI's log-probabilities join to the text, in whole answers and in streams."""

import asyncio
import random
import re

import pytest
from support import edge, sentencepiece_files, written_engine

from jdllm.checkpoint import source
from jdllm.engine.tokenizer import Tokenizer
from jdllm.options import sampling_params
from jdllm.server.edge import token_texts

CHAT, TEXT, GEN = "/v1/chat/completions", "/v1/completions", "/generate"
ALPHABET = "ab c\u00e4\u4e2d\U0001f600<|1+=## "
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Returns for each kind of vocabulary its tokenizer and its special tokens, the end first."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece_files.write(directory)
    pieces = Tokenizer(directory)
    letters = Tokenizer(source.bundled_model())
    return {
        "bytes": (letters, [letters.token_id(t) for t in ("<|role_end|>", "<|mask|>", "<role>")]),
        "pieces": (pieces, [pieces.token_id(t) for t in ("</s>", "<mask>", "<s>")]),
    }


def output(rng, tokenizer, specials):
    """Returns ids of a text, some of them single letters or bytes, with special tokens between."""
    ids = []
    for _ in range(rng.randint(1, 12)):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(1, 6)))
        ids += tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.4:
            ids.append(rng.choice(specials[1:]))
        if rng.random() < 0.1:
            ids.append(specials[0])
        if rng.random() < 0.5 and specials[0] > 256:  # words of the other vocabulary
            ids += rng.choices(range(260, len(tokenizer)), k=rng.randint(1, 4))
    return ids


def options(rng, text, ends):
    """Returns random fields of a request; stop strings are parts of the text."""
    begin = rng.randrange(len(text) + 1)
    stops = [text[begin : begin + rng.randint(1, 4)], "".join(rng.choices(ALPHABET, k=2))]
    return {
        "stop": [one for one in stops if one.strip()][: rng.randint(0, 2)] or None,
        "skip_special_tokens": rng.random() < 0.6,
        "no_stop_trim": rng.random() < 0.3,
        "ignore_eos": rng.random() < 0.7,
        "stop_token_ids": [rng.choice(ends)] if rng.random() < 0.5 else None,
    }


def ask(engine, path, **fields):
    given = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    given |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    response = edge.call(edge.make_state(engine), path, given | {"max_tokens": 400} | fields)
    assert response.status_code == 200, response.text
    return response


def entries(choice):
    """Returns the entries of a choice or chunk, a dict each, whatever the route."""
    found = choice["logprobs"]
    if found is None:
        return []
    if "content" in found:
        return found["content"]
    names = ("token", "logprob", "top", "offset")
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    rows = zip(*(found[column] for column in columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def data_of(entry):
    """Returns the bytes of an entry."""
    text = entry["token"]
    if not text.startswith("bytes:"):
        data = text.encode()
    else:
        data = bytes(int(pair, 16) for pair in re.findall(r"\\x(..)", text))
    assert entry.get("bytes", list(data)) == list(data)
    return data


def check_whole(rows, text):
    """Checks the laws of a choice: tokens join to the text, and begin where `offset` says."""
    joined = b""
    for row in rows:
        data = data_of(row)
        assert data, "a token without text is listed"
        if "offset" in row:
            assert row["offset"] == len(joined.decode(errors="ignore")), row
            if not row["token"].startswith("bytes:"):
                assert text[row["offset"] :].startswith(row["token"])
        joined += data
    # The end token may cut a character, and be a part of one.
    assert joined.decode(errors="ignore") == text.rstrip(REPLACEMENT)
    places = [row["logprob"] for row in rows]
    assert places == sorted(places, reverse=True) and len(set(places)) == len(places)


def check_stream(chunks, rows, text):
    """Checks that chunks join to the whole, and that a token comes with the last of its text."""
    ends, joined = [], b""
    for row in rows:
        joined += data_of(row)
        is_cut = joined.decode(errors="ignore").encode() != joined
        ends.append(len(joined.decode(errors="ignore")) + is_cut)
    sent, listed = "", []
    for chunk in chunks:
        sent += chunk["text"] if "text" in chunk else chunk["delta"].get("content", "")
        listed += entries(chunk)
        if chunk["finish_reason"] is None and chunk["logprobs"] is not None:
            reached = sum(end <= len(sent) for end in ends)
            # The last token of an answer may be cut at its end, which is not known before.
            assert len(listed) in (reached, min(reached, len(rows) - 1))
    assert sent == text
    assert listed == rows


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_tokens_join_to_the_text(tokenizers, kind, path, seed):
    tokenizer, specials = tokenizers[kind]
    rng = random.Random(seed)
    outputs = [output(rng, tokenizer, specials) for _ in range(2)]
    # Bytes of the vocabulary of letters, words of the other one.
    ends = range(6, 280) if kind == "bytes" else range(260, len(tokenizer))
    fields = options(rng, tokenizer.decode(outputs[0]), ends)
    launches = [rng.randint(1, 5) for _ in range(5)]
    engine = written_engine.WrittenEngine(
        tokenizer, outputs, launches, eos_token_ids=(specials[0],)
    )
    whole = ask(engine, path, n=2, **fields).json()["choices"]
    frames = edge.frames(ask(engine, path, n=2, stream=True, **fields))
    chunks = [choice for frame in frames for choice in frame["choices"]]
    for choice in whole:
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        rows = entries(choice)
        check_whole(rows, text)
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        check_stream(own, rows, text)


@pytest.mark.parametrize("seed", range(20))
def test_offsets_hold_where_bytes_are_no_characters(tokenizers, seed):
    """Random ids of a byte-level vocabulary: whole tokens are where they are said to be."""
    tokenizer, _ = tokenizers["bytes"]
    rng = random.Random(seed)
    singles = [i for i in range(6, len(tokenizer)) if len(tokenizer.token_bytes(i)) == 1]
    ids = rng.choices([*range(len(tokenizer)), *singles * 4], k=60)
    engine = written_engine.WrittenEngine(tokenizer, [ids], [rng.randint(1, 5) for _ in range(5)])
    (choice,) = ask(engine, TEXT, skip_special_tokens=seed % 2 == 0).json()["choices"]
    rows, text = entries(choice), choice["text"]
    assert b"".join(map(data_of, rows)).decode(errors="replace") == text
    for row in rows:
        if not row["token"].startswith("bytes:"):
            assert text[row["offset"] :].startswith(row["token"])
    frames = edge.frames(ask(engine, TEXT, stream=True, skip_special_tokens=seed % 2 == 0))
    chunks = [one for frame in frames for one in frame["choices"]]
    assert "".join(one["text"] for one in chunks) == text
    assert [row for one in chunks for row in entries(one)] == rows


def test_parts_of_characters_have_their_bytes_and_offsets(tokenizers):
    tokenizer, _ = tokenizers["bytes"]
    tokens = {tokenizer.token_bytes(i): i for i in range(6, len(tokenizer))}
    ids = [tokens[bytes([byte])] for byte in "aé€b".encode()]
    engine = written_engine.WrittenEngine(tokenizer, [ids], [2])
    (choice,) = ask(engine, TEXT).json()["choices"]
    parts = [f"bytes:\\x{byte:02x}" for byte in "é€".encode()]
    assert choice["logprobs"]["tokens"] == ["a", *parts, "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("size", [1, 2])
def test_a_character_that_stays_cut_counts_as_the_text_shows_it(tokenizers, size):
    for tokenizer, _ in tokenizers.values():
        cut = [i for i in range(len(tokenizer)) if tokenizer.token_bytes(i) in (b"\xe4", b"\xb8")]
        cut = sorted(cut, key=lambda i: -tokenizer.token_bytes(i)[0])[:size]
        ids = [*tokenizer.encode("a"), *cut, *tokenizer.encode("b", add_special_tokens=False), *cut]
        engine = written_engine.WrittenEngine(tokenizer, [ids], [1])
        (choice,) = ask(engine, TEXT).json()["choices"]
        assert REPLACEMENT in choice["text"]
        rows = entries(choice)
        for row in rows:
            if not row["token"].startswith("bytes:"):
                assert choice["text"][row["offset"] :].startswith(row["token"])
        assert [row["token"] for row in rows].count("b") == 1
        assert len(rows) >= 2 * size + 2


def letters(tokenizer, text):
    return [one for letter in text for one in tokenizer.encode(letter, add_special_tokens=False)]


def test_a_token_is_cut_where_a_stop_string_cuts_the_text(tokenizers):
    tokenizer, _ = tokenizers["bytes"]
    long = tokenizer.encode("he", add_special_tokens=False)
    assert len(long) == 1, "one token of two letters"
    engine = written_engine.WrittenEngine(tokenizer, [[*letters(tokenizer, "1+"), *long]], [3])
    (choice,) = ask(engine, TEXT, stop="e").json()["choices"]
    assert choice["text"] == "1+h"
    assert choice["logprobs"]["tokens"] == ["1", "+", "h"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert "h" in choice["logprobs"]["top_logprobs"][2]
    (choice,) = ask(engine, TEXT, stop="e", no_stop_trim=True).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["1", "+", "he"]


def test_the_end_token_is_listed_only_where_it_is_text(tokenizers):
    tokenizer, (end, *_) = tokenizers["bytes"]
    outputs = [[*letters(tokenizer, "12"), end]]
    engine = written_engine.WrittenEngine(tokenizer, outputs, [2], eos_token_ids=(end,))
    (choice,) = ask(engine, CHAT).json()["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", end)
    assert [row["token"] for row in entries(choice)] == ["1", "2"]
    chunks = [
        one for frame in edge.frames(ask(engine, CHAT, stream=True)) for one in frame["choices"]
    ]
    assert [row["token"] for one in chunks for row in entries(one)] == ["1", "2"]
    shown = {"skip_special_tokens": False, "no_stop_trim": True}
    (choice,) = ask(engine, CHAT, **shown).json()["choices"]
    assert choice["message"]["content"] == "12<|role_end|>"
    assert [row["token"] for row in entries(choice)] == ["1", "2", "<|role_end|>"]
    asked = {"input_ids": [7], "return_logprob": True, "return_text_in_logprobs": True}
    listed = edge.call(edge.make_state(engine), GEN, asked).json()["meta_info"]
    # SGLang's lists have every output token.
    assert [row[1:] for row in listed["output_token_logprobs"]][-1] == [end, "<|role_end|>"]


def test_an_answer_without_tokens_has_empty_lists(tokenizers):
    tokenizer, _ = tokenizers["bytes"]
    engine = written_engine.WrittenEngine(tokenizer, [[7]], [1])
    for path in (CHAT, TEXT):
        (choice,) = ask(engine, path, max_tokens=0).json()["choices"]
        assert entries(choice) == []


def test_a_long_stream_reads_each_token_once(tokenizers):
    tokenizer, _ = tokenizers["bytes"]
    ids = letters(tokenizer, "12+" * 100)
    engine = written_engine.WrittenEngine(tokenizer, [ids], [1])
    texts = token_texts.TokenTexts(tokenizer)
    params = sampling_params.SamplingParams(max_new_tokens=len(ids))
    listed = token_texts.ListedTokens(texts, params)

    async def follow():
        async for one in engine.stream([[7]], [params], request_ids=["r"]):
            assert len(listed.update(one)) == 1

    asyncio.run(follow())
    looked_up = texts.data.cache_info()
    assert looked_up.hits + looked_up.misses == len(ids) + 1  # the first one twice
