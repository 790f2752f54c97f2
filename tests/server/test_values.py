"""Forms of values that every route takes: whole numbers as floats, and empty values as none."""

from __future__ import annotations

from typing import Any

import pytest
from support import edge, fake_engine, fake_images

from jdllm.options import sampling_params
from jdllm.server.edge import bodies, request_model
from jdllm.server.images.request import GenerationRequest
from jdllm.server.ollama import request
from jdllm.server.ollama.request import ShowRequest
from jdllm.server.openai import conversation_fields
from jdllm.server.openai.requests import ChatRequest, CompletionRequest
from jdllm.server.openai.responses.request import ResponseRequest
from jdllm.server.operations import admin
from jdllm.server.sglang.requests import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

MESSAGES = [{"role": "user", "content": "hi"}]
IMAGES = "/v1/images/generations"
# path -> model, the least that a body needs
ROUTES: dict[str, tuple[type[request_model.RequestModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/generate": (GenerateRequest, {"text": "hi"}),
    "/v1/responses": (ResponseRequest, {"input": "hi"}),
    "/api/chat": (request.ChatRequest, {"messages": MESSAGES, "stream": False}),
    "/api/generate": (request.GenerateRequest, {"prompt": "hi", "stream": False}),
    "/api/show": (ShowRequest, {"model": "fake-model"}),
    "/tokenize": (TokenizeRequest, {"messages": MESSAGES}),
    "/detokenize": (DetokenizeRequest, {"tokens": [104]}),
    "/abort_request": (AbortRequest, {"rid": "x"}),
    IMAGES: (GenerationRequest, {"prompt": "hi", "seed": 3}),
}
EMPTY = ("", [], {}, False)
# What an empty value says of these is written in docs/requests.md.
MEANT = {"text", "input_ids", "prompt", "messages", "tokens", "input", "allowed_token_ids"}
MEANT |= {"negative_prompt"}


def ask(path: str, body: dict[str, Any]) -> tuple[int, Any, list[Any]]:
    """Returns the status, the answer without what is new in each, and what the engine saw."""
    if path == IMAGES:
        images = fake_images.FakeImageEngine()
        answer = edge.call(edge.make_state(images), path, body)
        return answer.status_code, plain(answer.json()), images.seen
    engine = fake_engine.FakeEngine()
    answer = edge.call(edge.make_state(engine), path, body)
    return answer.status_code, plain(answer.json()), engine.seen_params


NEW = {"id", "created", "created_at", "completed_at", "item_id", "total_duration", "e2e_latency"}
NEW |= {"eval_duration", "modified_at", "timings", "queue_time", "decode_throughput", "metadata"}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in NEW}
    return [plain(one) for one in value] if isinstance(value, list) else value


INTEGERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "max_tokens": 6, "max_completion_tokens": 6, "min_tokens": 2, "top_k": 5, "seed": 3, "n": 2,
        "top_logprobs": 2, "best_of": 1, "priority": 0, "stop_token_ids": [5, 6],
        "allowed_token_ids": [100, 101], "logit_bias": {"5": 1},
        "dllm": {"max_post_edit_steps": 4, "algorithm": "JointThreshold"},
    },
    "/v1/completions": {"logprobs": 2, "prompt": [104, 105], "max_tokens": 0, "n": 3},
    "/generate": {
        "top_logprobs_num": 2, "logprob_start_len": -1, "priority": 0,
        "sampling_params": {"max_new_tokens": 5, "n": 2, "top_k": 3, "sampling_seed": 1},
    },
    "/v1/responses": {"max_output_tokens": 5, "top_k": 3, "seed": 4, "max_tool_calls": 3},
    "/api/chat": {"options": {"num_predict": 5, "top_k": 3, "seed": 4, "num_ctx": 2048}},
    "/api/generate": {"options": {"num_predict": -1}, "keep_alive": 5},
    "/detokenize": {"tokens": [104, 105]},
    IMAGES: {
        "n": 2, "seed": [3, 4], "width": 96, "height": 64, "num_inference_steps": 3,
        "max_sequence_length": 40, "output_compression": 100, "priority": 0,
        "diffusers_kwargs": {"num_inference_steps": 3},
    },
}  # fmt: skip
BESIDE = {"top_logprobs": {"logprobs": True}, "top_logprobs_num": {"return_logprob": True}}
FIELDS = [(path, name) for path, fields in INTEGERS.items() for name in fields]


def changed(value: Any, change) -> Any:
    """Returns a value with all of its integers changed."""
    if isinstance(value, dict):
        return {key: changed(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [changed(one, change) for one in value]
    return change(value) if isinstance(value, int) else value


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_an_integer_may_be_written_as_a_float_and_a_fraction_is_refused(path, name):
    value = INTEGERS[path][name]
    least = ROUTES[path][1] | BESIDE.get(name, {} if path != IMAGES else {"n": 2, "seed": [3, 4]})
    status, answer, seen = ask(path, least | {name: value})
    assert status == 200, answer
    assert ask(path, least | {name: changed(value, float)}) == (status, answer, seen)
    if name in ("keep_alive", "logit_bias"):  # a number, and a bias
        return
    for change in (lambda number: number + 0.5, lambda _: True):
        status, answer, _ = ask(path, least | {name: changed(value, change)})
        assert status == 400, (answer, change)
        wanted = {name.rpartition("_")[2], *(value if isinstance(value, dict) else ())}
        assert any(one in str(answer) for one in wanted), answer


def test_lists_of_prompts_may_have_whole_floats_too():
    for path, name in (("/v1/completions", "prompt"), ("/generate", "input_ids")):
        least = {name: [[104.0], [105, 106.0]]}
        assert ask(path, least) == ask(path, {name: [[104], [105, 106]]})
        for wrong in ([[104.5]], [104.0, "a"], [[104.0], []], [1e300], [True]):
            assert ask(path, {name: wrong})[0] == 400


OPTIONAL = [
    (path, name)
    for path, (model, _) in ROUTES.items()
    for name, field in model.model_fields.items()
    if not field.is_required() and name not in MEANT
]


@pytest.mark.parametrize(("path", "name"), OPTIONAL)
def test_an_empty_value_of_a_served_field_is_none(path, name):
    least = {key: value for key, value in ROUTES[path][1].items() if key != name}
    if name in ROUTES[path][1] and name != "seed":
        return  # what the body needs, or what makes its answer one object
    least["model"] = "fake-model" if path == "/api/show" else "m"
    nothing = ask(path, least | {name: None}) if name != "seed" else None
    for empty in EMPTY:
        found = ask(path, least | {name: empty})
        assert found[0] == 200, (empty, found[1])
        is_flag = empty is False and bool in of(ROUTES[path][0], name)
        assert nothing is None or is_flag or found == nothing, empty


def of(model: type[request_model.RequestModel], name: str) -> list[Any]:
    found = [model.model_fields[name].annotation]
    for one in found:
        found += getattr(one, "__args__", ())
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"stream": True, "stream_options": "EMPTY include_usage zzz"}),
        ("/v1/chat/completions", {"dllm": "EMPTY threshold algorithm max_post_edit_steps zzz"}),
        ("/v1/chat/completions", {"response_format": "EMPTY zzz", "user": "me"}),
        ("/v1/chat/completions", {"response_format": "EMPTY schema type=text"}),
        ("/v1/responses", {"text": "EMPTY format verbosity zzz", "reasoning": "EMPTY effort zzz"}),
        ("/generate", {"sampling_params": "EMPTY temperature stop regex zzz max_new_tokens"}),
        ("/api/chat", {"options": "EMPTY temperature stop num_ctx numa num_predict zzz"}),
        (IMAGES, {"diffusers_kwargs": "EMPTY width guidance_scale generator zzz"}),
        ("/start_profile", {"num_steps": "", "output_dir": False, "zzz": []}),
    ],
)
def test_an_empty_value_passes_inside_of_objects(path, body):
    """`EMPTY a b` stands for an object whose a and b are empty, one after the other."""
    for empty in EMPTY:
        filled = {}
        for key, value in body.items():
            if isinstance(value, str) and value.startswith("EMPTY"):
                fields = [one.split("=") for one in value.split()[1:]]
                value = {name: rest[0] if rest else empty for name, *rest in fields}
            filled[key] = value
        if path == "/start_profile":
            parsed = bodies.part(admin.ProfileRequest, filled, "body")
            assert (parsed.num_steps, parsed.output_dir) == (None, None)
            continue
        asked = ROUTES[path][1] | filled
        if asked.get("stream"):
            assert edge.call(edge.make_state(), path, asked).status_code == 200
            continue
        status, answer, _ = ask(path, asked)
        assert status == 200, (empty, answer)


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_value_passes_in_every_field_of_a_message(empty):
    names = {*conversation_fields.Message.model_fields, "zzz", "refusal"} - {"role", "content"}
    for path in ("/v1/chat/completions", "/api/chat", "/tokenize"):
        for name in names:
            messages = [*MESSAGES, {"role": "assistant", "content": "a", name: empty}, *MESSAGES]
            status, answer, _ = ask(path, ROUTES[path][1] | {"messages": messages})
            assert status == 200, (path, name, answer)


def test_what_an_empty_value_says_is_not_lost():
    engine = fake_engine.FakeEngine()
    body = ROUTES["/v1/chat/completions"][1] | {"skip_special_tokens": False, "stream": False}
    edge.call(edge.make_state(engine), "/v1/chat/completions", body)
    assert engine.seen_params[0].skip_special_tokens is False
    images = fake_images.FakeImageEngine(facts=fake_images.FLUX_FACTS)
    asked = {"prompt": "a", "negative_prompt": "", "true_cfg_scale": 3.0}
    edge.call(edge.make_state(images), IMAGES, asked)
    assert images.seen[0].negative_prompt == ""
    for path, wrong in (
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}),
        ("/v1/chat/completions", {"messages": []}),
        ("/generate", {"text": "a", "skip_special_tokens": False}),
        ("/generate", {"text": "a", "sampling_params": {"skip_special_token": False}}),
        (IMAGES, {"prompt": "a", "embed_image_metadat": False}),
    ):
        assert ask(path, wrong)[0] == 400, wrong


def test_top_p_of_zero_is_greedy_on_every_route():
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat"):
        options = {"top_p": 0, "temperature": 2.0}
        body = {"options": options} if path.startswith("/api") else options
        status, answer, seen = ask(path, ROUTES[path][1] | body)
        assert (status, seen[0].temperature) == (200, 0.0), answer
    status, _, (seen,) = ask("/generate", {"text": "a", "sampling_params": {"top_p": 0}})
    assert (status, seen.temperature, type(seen)) == (200, 0.0, sampling_params.SamplingParams)


def test_a_random_seed_is_told_for_each_image():
    for seed in (-1, -1.0, [-1, 7, -1]):
        answer = ask(IMAGES, {"prompt": "a", "n": 3, "seed": seed})[1]
        seeds = [one["seed"] for one in answer["data"]]
        assert len(set(seeds)) == 3 and min(seeds) >= 0
        assert isinstance(seed, float | int) or seeds[1] == 7
