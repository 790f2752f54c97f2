"""What asks for nothing passes, all else is honoured or refused by name: for every known field.

The fields come from the installed `openai` package and from `data/request_fields.json` (written by
`scripts/list_request_fields.py` from SGLang's and vLLM's sources), so a field that a client can
send is a field that is tested.
"""

from __future__ import annotations

import difflib
import json
import pathlib
from typing import Any

import pydantic
import pytest
from openai.types import chat as openai_chat
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from support import edge, fake_engine

from jdllm import errors
from jdllm.foreign import fields as fields_of_foreign
from jdllm.foreign import fields as foreign_fields
from jdllm.foreign import neutral_values
from jdllm.options import sampling_params
from jdllm.options.sampling_params import DllmParams, SamplingParams
from jdllm.server.edge import request_model
from jdllm.server.ollama import request as ollama
from jdllm.server.openai import conversation_fields
from jdllm.server.openai.requests import ChatRequest, CompletionRequest, OpenAIRequest
from jdllm.server.openai.responses.request import ResponseRequest
from jdllm.server.sglang.requests import DetokenizeRequest, GenerateRequest, TokenizeRequest

LISTED = json.loads((pathlib.Path(__file__).parents[1] / "data/request_fields.json").read_text())
MESSAGES = [{"role": "user", "content": "hi"}]
# kind of body -> (path, model, the least that it needs)
BODIES: dict[str, tuple[str, type[request_model.RequestModel], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", ChatRequest, {"messages": MESSAGES}),
    "completions": ("/v1/completions", CompletionRequest, {"prompt": "hi"}),
    "responses": ("/v1/responses", ResponseRequest, {"input": "hi"}),
    "generate": ("/generate", GenerateRequest, {"text": "hi"}),
    "tokenize": ("/tokenize", TokenizeRequest, {"messages": MESSAGES}),
    "detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [104]}),
}
# Values of every type; none of them is the default of a field.
ASKING = ("x", 5, 0.5, -7, True, ["x"], [[5]], {"x": 1}, {"type": "x"}, [{"type": "function"}])


def fields_of(kind: str) -> dict[str, list[Any]]:
    """Returns the defaults of each field of a kind of body, from all sources."""
    found: dict[str, list[Any]] = {}
    for fields in LISTED[kind].values():
        for name, default in fields.items():
            found.setdefault(name, [None]).append(default)
    for name in OPENAI.get(kind, ()):
        found.setdefault(name, [None])
    return found


OPENAI = {
    "chat": {
        **chat_create_params.CompletionCreateParamsBase.__annotations__,
        **chat_create_params.CompletionCreateParamsStreaming.__annotations__,
    },
    "completions": {
        **completion_create_params.CompletionCreateParamsBase.__annotations__,
        **completion_create_params.CompletionCreateParamsStreaming.__annotations__,
    },
    "responses": {
        **response_create_params.ResponseCreateParamsBase.__annotations__,
        **response_create_params.ResponseCreateParamsStreaming.__annotations__,
    },
}
EACH = [(kind, name) for kind in BODIES for name in sorted(fields_of(kind))]


def parse(kind: str, extra: dict[str, Any]) -> request_model.RequestModel:
    """Parses a body as the route does, down to the decoding options; raises `RequestError`."""
    _, model, least = BODIES[kind]
    try:
        body = model.model_validate(least | extra)
    except pydantic.ValidationError as error:
        raise request_model.first_problem(error) from error
    if isinstance(body, OpenAIRequest | ResponseRequest):
        body.sampling(8)
    return body


def served(kind: str) -> set[str]:
    return set(BODIES[kind][1].model_fields)


def test_the_sources_are_whole():
    assert {"max_completion_tokens", "logit_bias", "tools", "stream"} <= {*OPENAI["chat"]}
    assert {"best_of", "echo", "suffix"} <= {*OPENAI["completions"]}
    assert len(fields_of("chat")) > 80
    assert len(fields_of("generate")) > 50
    assert LISTED["sampling_params"]["sglang"]["repetition_penalty"] == 1.0


@pytest.mark.parametrize(("kind", "name"), EACH, ids=[f"{k}-{n}" for k, n in EACH])
def test_the_default_passes_and_anything_else_is_honoured_or_refused_by_name(kind, name):
    for default in fields_of(kind)[name]:
        if default is None and name in BODIES[kind][2]:
            continue  # what a body needs
        if (default, name) == ("auto", "tool_choice"):
            default = None  # SGLang's own rule: without tools the default is "none"
        parse(kind, {name: default})
    if name in served(kind):
        return  # tests of the field itself say that it is honoured
    labels = foreign_fields.LABELS
    for value in ASKING:
        if name in labels and type(value) is labels[name]:
            parse(kind, {name: value})  # a label: it changes no output
        elif value not in BODIES[kind][1].foreign.get(name, ()):
            with pytest.raises(errors.RequestError) as refused:
                parse(kind, {name: value})
            assert str(refused.value.param).split(".")[0] == name


@pytest.mark.parametrize("kind", BODIES)
def test_all_defaults_at_once_pass(kind):
    path, _, least = BODIES[kind]
    for source in LISTED[kind].values():
        body = source | least
        if kind in ("chat", "tokenize"):
            body |= {"tool_choice": "none"}
        if kind == "tokenize":
            body |= {"prompt": None}
        response = edge.call(edge.make_state(), path, body)
        assert response.status_code == 200, response.text


def test_sampling_params_of_sglang_pass_or_are_refused():
    fields = LISTED["sampling_params"]["sglang"]
    assert sampling_params.SamplingParams.from_mapping(fields)
    known = sampling_params.SamplingParams.__dataclass_fields__
    for name in set(fields) - set(known) - {"sampling_seed"}:
        for value in ASKING:
            if value in fields_of_foreign.NEUTRAL_ONLY.get(name, ()):
                continue
            with pytest.raises(errors.RequestError) as refused:
                sampling_params.SamplingParams.from_mapping({name: value})
            assert str(refused.value.param).split(".")[0] == name


@pytest.mark.parametrize("value", [None, False, "", [], {}])
@pytest.mark.parametrize("kind", BODIES)
def test_an_empty_value_passes_under_any_name(kind, value):
    parse(kind, {"a_field_of_next_year": value})
    sampling_params.SamplingParams.from_mapping({"a_field_of_next_year": value})


@pytest.mark.parametrize("value", [0, 0.0, 1, True, " ", [None], [[]], {"a": None}, "none"])
@pytest.mark.parametrize("kind", BODIES)
def test_any_other_value_under_an_unknown_name_is_refused(kind, value):
    with pytest.raises(errors.RequestError) as refused:
        parse(kind, {"a_field_of_next_year": value})
    assert refused.value.param == "a_field_of_next_year"


@pytest.mark.parametrize("name", ["temprature", "max_token", "seeds", "top_ks"])
def test_a_misspelt_number_is_refused_even_if_it_is_zero(name):
    for kind in ("chat", "completions"):
        with pytest.raises(errors.RequestError, match="did you mean") as refused:
            parse(kind, {name: 0})
        assert refused.value.param == name


def test_false_does_not_switch_off_what_is_on_by_default():
    for name in ("skip_special_token", "skip_special_tokenss", "add_generation_prompts"):
        with pytest.raises(errors.RequestError, match="did you mean"):
            parse("chat", {name: False})
    for name in neutral_values.ON_BY_DEFAULT - served("completions"):
        if name in ("add_generation_prompt", "escape_special_tokens"):
            continue  # a text has none
        with pytest.raises(errors.RequestError):
            parse("completions", {name: False})


def test_values_of_another_type_are_not_the_default():
    for name, value in (("min_p", True), ("best_of", True), ("priority", True)):
        with pytest.raises(errors.RequestError) as refused:
            parse("completions", {name: value})
        assert refused.value.param == name
    parse("completions", {"data_parallel_rank": 0.0})


def test_many_or_long_unknown_names_cost_little():
    many = {f"unknown_{i}": False for i in range(100_000)}
    with pytest.raises(errors.RequestError, match="more than 100 unknown parameters, such as"):
        parse("chat", many)
    with pytest.raises(errors.RequestError) as refused:
        parse("chat", {"x" * 10**6: [5] * 10**6})
    assert len(str(refused.value)) < 10_000
    assert len(refused.value.param or "") < 100


@pytest.mark.parametrize(
    "read",
    [
        DllmParams.from_mapping,
        SamplingParams.from_mapping,
        lambda many: ollama.Request.model_validate({"options": many}).sampling(5),
    ],
    ids=["dllm", "sampling_params", "options"],
)
def test_unknown_names_inside_of_an_object_are_counted_together(read, monkeypatch):
    compared: list[str] = []

    def matches(name: str, *args: Any, **options: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", matches)
    most = neutral_values.MAX_UNKNOWN
    read({f"abc_tokens{i}": False for i in range(most)})
    compared.clear()
    with pytest.raises(errors.RequestError, match=f"more than {most} unknown") as refused:
        read({f"abc_tokens{i}": False for i in range(20 * most)})
    assert len(compared) <= most
    assert str(refused.value.param).endswith(f"abc_tokens{most}")


# What sglang-router 0.3.2 makes of a client's plain request, recorded in front of two servers.
ROUTED = {
    "chat": {
        "messages": [{"role": "developer", "content": "hi"}, {**MESSAGES[0], "name": "x"}],
        "model": "m", "logprobs": False, "max_completion_tokens": 6, "stream": False,
        "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
        "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
        "return_hidden_states": False,
    },
    "completions": {
        "model": "m", "prompt": "hi", "max_tokens": 6, "stream": False, "echo": False,
        "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
        "return_hidden_states": False,
    },
    "responses": {
        "input": [{"content": [{"type": "input_text", "text": "x"}], "role": "user"}],
        "model": "m", "max_output_tokens": 6, "parallel_tool_calls": True, "store": True,
        "stream": None, "temperature": 1.0, "top_p": 1.0, "tool_choice": "none", "priority": 0,
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
    "generate": {
        "text": "hi", "model": None, "sampling_params": {"max_new_tokens": 6},
        "return_text_in_logprobs": False, "stream": False, "log_metrics": True,
        "return_hidden_states": False, "background": False, "no_logs": False,
        "return_bytes": False, "return_entropy": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROUTED)
def test_requests_of_the_router_are_served(kind):
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), BODIES[kind][0], ROUTED[kind])
    assert response.status_code == 200, response.text
    assert engine.seen_params[0].max_new_tokens == 6


def roles() -> dict[str, Any]:
    return {
        "developer": openai_chat.ChatCompletionDeveloperMessageParam,
        "system": openai_chat.ChatCompletionSystemMessageParam,
        "user": openai_chat.ChatCompletionUserMessageParam,
        "assistant": openai_chat.ChatCompletionAssistantMessageParam,
        "tool": openai_chat.ChatCompletionToolMessageParam,
        "function": openai_chat.ChatCompletionFunctionMessageParam,
    }


@pytest.mark.parametrize("role", sorted(roles()))
def test_fields_of_messages_pass_empty_and_are_served_or_refused(role):
    assert role in conversation_fields.ROLES
    for name in roles()[role].__annotations__:
        if name in ("role", "content"):
            continue
        parse("chat", {"messages": [{"role": role, "content": "x", name: None}]})
        if name in conversation_fields.Message.model_fields:
            continue
        with pytest.raises(errors.RequestError) as refused:
            parse("chat", {"messages": [{"role": role, "content": "x", name: "full"}]})
        assert refused.value.param == f"messages.0.{name}"
