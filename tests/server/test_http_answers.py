"""What a good request gets: texts, counts, order, frames, defaults."""

from __future__ import annotations

import pytest
from support import edge, fake_engine

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_PROMPT = "<user>hi"

NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": False,
    "top_logprobs": None,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "logit_bias": {},
    "user": "me",
    "store": False,
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "echo": False,
    "best_of": 1,
    "suffix": None,
    "min_tokens": 0,
    "stream_options": None,
    "stop": None,
    "seed": None,
}


def test_chat_answer():
    engine = fake_engine.FakeEngine()
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 6, "rid": "mine"}
    answer = edge.call(edge.make_state(engine), CHAT, body).json()
    created = answer.pop("created")
    assert created > 1_600_000_000
    assert answer == {
        "id": "mine",
        "object": "chat.completion",
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": fake_engine.expected_text(CHAT_PROMPT, 6),
                },
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 2},
            "dllm": {
                "nfe": 4,
                "tpf": 1.5,
                "blocks": 2,
                "edited_tokens": 1,
                "discarded_tokens": 0,
                "algorithm": "LowConfidence",
                "threshold": 0.95,
            },
        },
    }
    assert engine.open_requests == set()


def test_options_reach_the_engine():
    engine = fake_engine.FakeEngine()
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
        "max_completion_tokens": 5,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 7,
        "n": 2,
        "stop": "x",
        "stop_token_ids": [1],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "dllm": {"algorithm": "JointThreshold", "edit_threshold": 0.5},
        "chat_template_kwargs": {"shout": True},
    }
    assert edge.call(edge.make_state(engine), CHAT, body).status_code == 200
    (params,) = engine.seen_params
    assert engine.seen_prompts == [list(b"<USER>A B")]
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (5, 1, 0.5, 3)
    assert (params.seed, params.n, params.stop, params.stop_token_ids) == (7, 2, ("x",), (1,))
    assert (params.ignore_eos, params.skip_special_tokens, params.no_stop_trim) == (
        True,
        False,
        True,
    )
    assert (params.dllm.algorithm, params.dllm.edit_threshold) == ("JointThreshold", 0.5)


def test_default_output_limits():
    engine = fake_engine.FakeEngine()
    server = edge.make_state(engine)
    assert edge.call(server, CHAT, {"messages": MESSAGES}).status_code == 200
    edge.call(server, "/v1/completions", {"prompt": "hi"})
    edge.call(server, "/generate", {"text": "hi"})
    edge.call(server, "/generate", {"text": "x" * (fake_engine.CONTEXT - 5)})
    limits = [params.max_new_tokens for params in engine.seen_params]
    assert limits == [fake_engine.CONTEXT - 8, 16, 128, 5]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_neutral_values_pass(path):
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    for name in ("tools", "tool_choice"):
        body |= {name: NEUTRAL[name]} if path == CHAT else {}
    body |= {k: v for k, v in NEUTRAL.items() if k not in ("tools", "tool_choice")}
    response = edge.call(edge.make_state(), path, body)
    assert response.status_code == 200, response.text


def test_lm_eval_and_sglang_bench_bodies_pass():
    server = edge.make_state()
    lm_eval = {"messages": MESSAGES, "temperature": 0, "seed": 1234, "stop": ["\n\n"], "model": "m"}
    assert edge.call(server, CHAT, lm_eval).status_code == 200
    bench = {
        "text": "hi",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    assert edge.call(server, "/generate", bench).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
def test_completion_prompt_forms_and_choice_order(prompt, prompts):
    body = {"prompt": prompt, "max_tokens": 5, "n": 2}
    answer = edge.call(edge.make_state(), "/v1/completions", body).json()
    expected = [fake_engine.expected_text(p.decode(), 5, c) for p in prompts for c in (0, 1)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(len(p) for p in prompts)
    assert usage["completion_tokens"] == 5 * len(expected)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * len(prompts)
    assert usage["dllm"]["nfe"] == 4 * len(expected)
    assert usage["dllm"]["tpf"] == 1.25


def test_matched_stop():
    stop = fake_engine.expected_ids(list(b"hi"), 3)[2]
    body = {"prompt": "hi", "stop_token_ids": [stop]}
    (choice,) = edge.call(edge.make_state(), "/v1/completions", body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == stop
    assert choice["text"] == fake_engine.expected_text("hi", 2)


def test_chat_stream():
    options = {"include_usage": True}
    body = {
        "messages": MESSAGES,
        "max_tokens": 6,
        "n": 2,
        "stream": True,
        "stream_options": options,
    }
    chunks = edge.frames(edge.call(edge.make_state(), CHAT, body))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["usage"]["dllm"]["nfe"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == fake_engine.expected_text(
            CHAT_PROMPT, 6, index
        )
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]


def test_completion_stream_with_continuous_usage():
    body = {"prompt": ["a", "b"], "max_tokens": 6, "stream": True}
    body["stream_options"] = {"continuous_usage_stats": True}
    chunks = edge.frames(edge.call(edge.make_state(), "/v1/completions", body))
    for index, prompt in enumerate("ab"):
        mine = [c for c in chunks if c["choices"][0]["index"] == index]
        texts = [c["choices"][0]["text"] for c in mine]
        assert "".join(texts) == fake_engine.expected_text(prompt, 6)
        assert [c["usage"]["completion_tokens"] for c in mine] == [4, 6]
    plain = edge.frames(
        edge.call(edge.make_state(), "/v1/completions", {"prompt": "a", "stream": True})
    )
    assert all("usage" not in chunk for chunk in plain)


def test_cached_tokens_in_detail_come_whole_or_with_the_last_chunk_of_a_choice():
    expected = {"cached_tokens_details": {"device": 2, "host": 0}}
    body = {"prompt": "a", "max_tokens": 6, "n": 2, "return_cached_tokens_details": True}
    whole = edge.call(edge.make_state(), "/v1/completions", body).json()
    assert whole["sglext"] == expected
    streamed = edge.call(edge.make_state(), "/v1/completions", body | {"stream": True})
    chunks = edge.frames(streamed)
    for chunk in chunks:
        is_last = chunk["choices"][0]["finish_reason"] is not None
        assert chunk.get("sglext") == (expected if is_last else None)
    assert sum("sglext" in chunk for chunk in chunks) == 2
    plain = edge.call(edge.make_state(), "/v1/completions", {"prompt": "a"}).json()
    assert "sglext" not in plain


def test_a_late_fault_is_an_error_frame_then_done():
    body = {"prompt": [0, 254], "max_tokens": 12, "stream": True}
    response = edge.call(edge.make_state(), "/v1/completions", body)
    assert response.status_code == 200
    *chunks, last = edge.frames(response)
    assert len(chunks) == 2
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_generate_forms():
    server = edge.make_state()
    one = edge.call(server, "/generate", {"text": "hi", "rid": "r"}, method="PUT").json()
    assert one["text"] == fake_engine.expected_text("hi", 128)
    assert one["output_ids"] == fake_engine.expected_ids(list(b"hi"), 128)
    assert one["meta_info"]["id"] == "r"
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    options = [{"max_new_tokens": 3}, {"max_new_tokens": 5}]
    many = edge.call(server, "/generate", {"text": ["a", "b"], "sampling_params": options}).json()
    assert [reply["text"] for reply in many] == [
        fake_engine.expected_text("a", 3),
        fake_engine.expected_text("b", 5),
    ]
    single = edge.call(server, "/generate", {"input_ids": [[97]]}).json()
    assert isinstance(single, list)
    two = {"input_ids": [97], "sampling_params": {"n": 2, "max_new_tokens": 4}}
    texts = [reply["text"] for reply in edge.call(server, "/generate", two).json()]
    assert texts == [fake_engine.expected_text("a", 4, c) for c in (0, 1)]


def test_generate_stream_is_cumulative():
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 10}, "stream": True}
    events = edge.frames(edge.call(edge.make_state(), "/generate", body))
    lengths = [4, 8, 10]
    assert [e["text"] for e in events] == [fake_engine.expected_text("hi", n) for n in lengths]
    assert [e["meta_info"]["completion_tokens"] for e in events] == lengths
    assert all("index" not in event for event in events)
    body = {"text": ["a", "b"], "sampling_params": {"n": 2, "max_new_tokens": 4}, "stream": True}
    events = edge.frames(edge.call(edge.make_state(), "/generate", body))
    texts = {e["index"]: e["text"] for e in events}
    expected = [fake_engine.expected_text(p, 4, c) for p in "ab" for c in (0, 1)]
    assert texts == dict(enumerate(expected))


def test_tokenize_and_detokenize():
    server = edge.make_state()
    context = {"max_model_len": fake_engine.CONTEXT}
    one = edge.call(server, "/tokenize", {"prompt": "hi"}).json()
    assert one == {"tokens": [104, 105], "count": 2} | context
    many = edge.call(server, "/v1/tokenize", {"prompt": ["a", ""]}).json()
    assert many == {"tokens": [[97], []], "count": [1, 0]} | context
    chat = edge.call(server, "/tokenize", {"messages": MESSAGES}).json()
    assert chat["tokens"] == list(CHAT_PROMPT.encode())
    assert edge.call(server, "/detokenize", {"tokens": [104, 105]}).json() == {"text": "hi"}


def test_cards_and_information():
    server = edge.make_state()
    (card,) = edge.call(server, "/v1/models").json()["data"]
    assert card["id"] == "fake-model"
    assert card["max_model_len"] == fake_engine.CONTEXT
    assert edge.call(server, "/v1/models/fake-model").json() == card
    for path in ("/model_info", "/get_model_info"):
        assert edge.call(server, path).json()["is_generation"] is True
    secret = edge.make_state(api_key="k1", admin_api_key="k2")
    for path in ("/server_info", "/get_server_info"):
        response = edge.call(secret, path, headers={"authorization": "Bearer k1"})
        assert response.json()["internal_states"] == [{}]
        assert "k1" not in response.text
        assert "k2" not in response.text
    assert "CompletionRequest" in edge.call(server, "/openapi.json").text


def test_health_and_control():
    server = edge.make_state()
    for path in ("/health", "/ready", "/health_generate"):
        assert edge.call(server, path).status_code == 200
    for method in ("GET", "POST"):
        response = edge.call(server, "/flush_cache", method=method)
        assert response.status_code == 200
        assert response.text.startswith("Cache flushed")
    response = edge.call(server, "/abort_request", {"rid": "unknown"})
    assert response.json() == {"success": True, "num_aborted": 0}
    server.loaded_engine.is_alive = False
    assert edge.call(server, "/health").status_code == 503


def test_metrics_count_what_happened():
    server = edge.make_state(enable_metrics=True)
    edge.call(server, "/v1/completions", {"prompt": "a", "max_tokens": 8})
    edge.call(server, "/v1/completions", {"prompt": ""})
    edge.call(server, "/scanner/1")
    edge.call(server, "/scanner/2")
    lines = edge.call(server, "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model_name="fake-model"}'
    route = 'endpoint="/v1/completions",method="POST"'
    expected = {
        f"jdllm:generation_tokens_total{label}": 8,
        f"jdllm:token_usage{label}": 0.25,
        f"jdllm:dllm_denoising_steps_total{label}": 0,
        f"jdllm:e2e_request_latency_seconds_count{label}": 1,
        f"jdllm:time_to_first_token_seconds_count{label}": 1,
        f"jdllm:inter_block_latency_seconds_count{label}": 1,
        f"jdllm:dllm_block_steps_sum{label}": 4,
        f"jdllm:dllm_block_steps_count{label}": 2,
        f"jdllm:dllm_tokens_per_forward_sum{label}": 2,
        f"jdllm:http_requests_total{{{route}}}": 2,
        f'jdllm:http_responses_total{{{route},status_code="200"}}': 1,
        f'jdllm:http_responses_total{{{route},status_code="400"}}': 1,
        'jdllm:http_requests_total{endpoint="other",method="GET"}': 2,
    }
    assert {name: float(values[name]) for name in expected} == expected
    assert not any("scanner" in line for line in lines)
