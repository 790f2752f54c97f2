"""Log-probabilities on the wire: OpenAI's and SGLang's shapes, in whole answers and in streams."""

import json

import numpy as np
import pytest
from support import edge, fake_engine

from jdllm.checkpoint import source
from jdllm.engine.tokenizer import Tokenizer

CHAT, TEXT, GEN = "/v1/chat/completions", "/v1/completions", "/generate"
COUNT = 6
IDS = {
    CHAT: fake_engine.expected_ids(list(b"<user>hi"), COUNT),
    TEXT: fake_engine.expected_ids(list(b"hi"), COUNT),
}


def call(path, **fields):
    base = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    response = edge.call(edge.make_state(), path, base | {"max_tokens": COUNT} | fields)
    assert response.status_code == 200, response.text
    return response


def chunks(response):
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def chat_rows(top):
    def entry(token, value):
        return {"token": chr(token), "logprob": value, "bytes": [token]}

    return [
        entry(token, -i / 8) | {"top_logprobs": [entry(token + k, -i / 8 - k) for k in range(top)]}
        for i, token in enumerate(IDS[CHAT])
    ]


@pytest.mark.parametrize("top", [0, 3])
def test_chat(top):
    fields = {"logprobs": True, "top_logprobs": top}
    (choice,) = call(CHAT, **fields).json()["choices"]
    assert choice["logprobs"] == {"content": chat_rows(top), "refusal": None}
    parts = chunks(call(CHAT, stream=True, **fields))
    listed = [part for part in parts if part["logprobs"] is not None]
    assert all(part["delta"]["content"] for part in listed) and len(listed) == 2
    assert [row for part in listed for row in part["logprobs"]["content"]] == chat_rows(top)


@pytest.mark.parametrize("top", [0, 2])
def test_text(top):
    texts = [chr(token) for token in IDS[TEXT]]
    expected = {
        "tokens": texts,
        "token_logprobs": [-i / 8 for i in range(COUNT)],
        "top_logprobs": [
            {chr(ord(t) + k): -i / 8 - k for k in range(top)} if top else None
            for i, t in enumerate(texts)
        ],
        "text_offset": list(range(COUNT)),
    }
    (choice,) = call(TEXT, logprobs=top).json()["choices"]
    assert choice["logprobs"] == expected
    joined = {name: [] for name in expected}
    for part in chunks(call(TEXT, logprobs=top, stream=True)):
        for name, values in part["logprobs"].items():
            joined[name] += values
    assert joined == expected


def test_nobody_gets_them_unasked():
    for path in (CHAT, TEXT):
        (choice,) = call(path).json()["choices"]
        assert choice["logprobs"] is None
        assert all(part["logprobs"] is None for part in chunks(call(path, stream=True)))


@pytest.mark.parametrize("with_text", [False, True])
def test_generate(with_text):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True,
            "top_logprobs_num": 2, "return_text_in_logprobs": with_text}  # fmt: skip
    meta = edge.call(edge.make_state(), GEN, body).json()["meta_info"]
    ids = fake_engine.expected_ids([1], 2)
    text = lambda token: chr(token) if with_text else None  # noqa: E731
    assert meta["output_token_logprobs"] == [[-i / 8, t, text(t)] for i, t in enumerate(ids)]
    assert meta["output_top_logprobs"] == [
        [[-i / 8 - k, t + k, text(t + k)] for k in range(2)] for i, t in enumerate(ids)
    ]


def test_the_bytes_of_all_tokens_make_up_the_text():
    """Of the bundled byte-level tokenizer, also where a token is a part of a character."""
    tokenizer = Tokenizer(source.bundled_model())
    rng = np.random.default_rng(0)
    for text in (
        "Tom has 7 apples.",
        "naïve – 数字 🙂",
        "".join(map(chr, rng.integers(160, 3000, 40))),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) == text:
            assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.token_bytes(tokenizer.encode("7", add_special_tokens=False)[0]) == b"7"
