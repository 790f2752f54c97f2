"""POST /v1/responses: answers and events as the openai package types them, and refusals."""

from __future__ import annotations

import json

import pydantic
import pytest
from openai.types import responses as openai_types
from support import edge, fake_engine

from jdllm.server.openai.responses import items

PATH = "/v1/responses"
PROMPT = "<user>hi"
EVENT = pydantic.TypeAdapter(openai_types.ResponseStreamEvent)
STOP_TOKEN = fake_engine.expected_ids(list(PROMPT.encode()), 6)[5]
# What clients send although it asks for nothing.
NEUTRAL = {
    "background": False,
    "conversation": None,
    "include": ["reasoning.encrypted_content"],
    "instructions": None,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": "key",
    "reasoning": {"effort": "none", "summary": None},
    "safety_identifier": "me",
    "service_tier": "auto",
    "store": True,
    "stream": False,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "none",
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": "me",
    "min_p": 0,
    "presence_penalty": 0.0,
}


class FaultyTokenizer(fake_engine.FakeTokenizer):
    """Makes a prompt whose answer fails after its first block."""

    def apply_chat_template(self, messages, **options):
        return [0, 254]


def ask(**fields):
    return {"model": "any", "input": "hi", "max_output_tokens": 6} | fields


def answer_of(body, engine=None) -> openai_types.Response:
    response = edge.call(edge.make_state(engine), PATH, body)
    assert response.status_code == 200, response.text
    return openai_types.Response.model_validate(response.json())


def events_of(response) -> list[openai_types.ResponseStreamEvent]:
    """Returns the events of a stream: each has its own type, twice, and its own number."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, part in enumerate(filter(None, response.text.split("\n\n"))):
        first, second = part.split("\n")
        content = json.loads(second.removeprefix("data: "))
        assert first == f"event: {content['type']}"
        assert content["sequence_number"] == number
        events.append(EVENT.validate_python(content))
    return events


def test_an_answer_that_reached_its_limit_is_incomplete():
    answer = answer_of(ask(rid="mine", instructions="be"))
    prompt = "<system>be" + PROMPT
    assert (answer.id, answer.object, answer.status) == ("mine", "response", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == fake_engine.expected_text(prompt, 6)
    assert answer.instructions == "be"
    assert answer.usage is not None
    counts = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens)
    assert counts == (len(prompt), 6, len(prompt) + 6)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.model_extra["dllm"]["nfe"] == 4


def test_an_answer_that_stopped_is_completed():
    answer = answer_of(ask(max_output_tokens=20, stop_token_ids=[STOP_TOKEN]))
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.output_text == fake_engine.expected_text(PROMPT, 5)
    assert [item.status for item in answer.output] == ["completed"]


def test_without_a_limit_the_rest_of_the_context():
    engine = fake_engine.FakeEngine()
    answer_of({"input": "hi"}, engine)
    (params,) = engine.seen_params
    assert params.max_new_tokens == fake_engine.CONTEXT - len(PROMPT)


def test_options_reach_the_engine():
    engine = fake_engine.FakeEngine()
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["x"]}
    answer = answer_of(ask(**options, dllm={"threshold": 0.7}), engine)
    (params,) = engine.seen_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.seed, params.stop, params.dllm.threshold) == (3, ("x",), 0.7)
    assert (answer.temperature, answer.top_p) == (0.5, 0.9)


@pytest.mark.parametrize("store", [True, None, False])
def test_nothing_is_stored_and_the_answer_says_so(store):
    assert answer_of(ask(store=store)).model_extra["store"] is False


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_fields_change_nothing(name):
    fields = {name: NEUTRAL[name]}
    if name == "tools":
        fields["tool_choice"] = "none"
    assert answer_of(ask(**fields)).output_text == fake_engine.expected_text(PROMPT, 6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"min_p": "much"}, "min_p"),
        ({"dllm": {"thresold": 1}}, "dllm.thresold"),
        ({"dllm": [1]}, "dllm"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [{}]}, "messages"),
        ({"rid": "r" * 257}, "rid"),
        ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{"role": "user", "content": ""}] * 8193}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input.0.mood"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input.0.type"),
        ({"input": [{"type": ["x"] * 9999}]}, "input.0.type"),
        ({"input": [{"type": "reasoning", "summary": ["hm"]}]}, "input.0.summary.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(fields, param, stream):
    if "stream_options" in fields and stream:
        fields = {"stream_options": {"include_obfuscation": True}}
        param = "stream_options.include_obfuscation"
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), PATH, ask(stream=stream, **fields))
    assert response.status_code == 400
    error = edge.error_of(response)
    assert error["param"] == param
    assert len(error["message"]) < 2000
    assert engine.seen_prompts == []


def test_the_parts_of_a_conversation_become_its_turns():
    conversation = [
        {"role": "system", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "more"},
    ]
    engine = fake_engine.FakeEngine()
    answer_of(ask(input=conversation), engine)
    assert engine.seen_prompts == [list(b"<system>be<user>hi<assistant>yes<user>more")]


def test_an_answer_can_be_sent_back_as_it_came():
    engine = fake_engine.FakeEngine()
    first = edge.call(edge.make_state(engine), PATH, ask()).json()
    history = [
        {"role": "user", "content": "hi"},
        *first["output"],
        {"role": "user", "content": "?"},
    ]
    answer_of(ask(input=history), engine)
    said = fake_engine.expected_text(PROMPT, 6)
    assert engine.seen_prompts[1] == list(f"<user>hi<assistant>{said}<user>?".encode())


def test_calls_of_tools_are_turns_of_the_chat_route():
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "status": "completed"}
    conversation = [
        {"role": "user", "content": "hi"},
        call | {"call_id": "c1", "id": "fc_1"},
        call | {"call_id": "c2", "id": "fc_2"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": "4"},
    ]
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": i, "type": "function", "function": function} for i in ("c1", "c2")]
    assert [turn for _, turn in items.turns(conversation, None)] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]


def test_a_stream_builds_up_the_answer():
    response = edge.call(edge.make_state(), PATH, ask(max_output_tokens=10, stream=True))
    events = events_of(response)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    text = fake_engine.expected_text(PROMPT, 10)
    created, _, added, *rest, text_done, part_done, item_done, end = events
    assert "".join(event.delta for event in rest if hasattr(event, "delta")) == text
    assert text_done.text == part_done.part.text == item_done.item.content[0].text == text
    assert created.response.output == added.item.content == []
    assert (created.response.status, end.response.status) == ("in_progress", "incomplete")
    assert created.response.id == end.response.id
    assert added.item.id == text_done.item_id == item_done.item.id
    assert end.response.output == [item_done.item]
    assert end.response.usage.output_tokens == 10


def test_a_stream_ends_like_the_whole_answer():
    body = ask(stop_token_ids=[STOP_TOKEN], rid="mine")
    whole = edge.call(edge.make_state(), PATH, body).json()
    (*_, end) = events_of(edge.call(edge.make_state(), PATH, body | {"stream": True}))
    assert end.type == "response.completed"
    streamed = end.response.model_dump(mode="json", exclude_unset=True)
    for one in (whole, streamed):
        for name in ("created_at", "completed_at"):
            one.pop(name)
        one["output"][0].pop("id")
    assert streamed == whole


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_has_failed_and_says_why(stream):
    engine = fake_engine.FakeEngine()
    engine._aborted.add("mine")
    response = edge.call(edge.make_state(engine), PATH, ask(rid="mine", stream=stream))
    if stream:
        (*_, end) = events_of(response)
        assert end.type == "response.failed"
        answer = end.response
    else:
        answer = openai_types.Response.model_validate(response.json())
    assert answer.status == "failed"
    assert answer.error is not None
    assert answer.error.message == "aborted"


def test_a_late_fault_is_the_last_event():
    engine = fake_engine.FakeEngine(tokenizer=FaultyTokenizer())
    events = events_of(edge.call(edge.make_state(engine), PATH, ask(stream=True)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    assert events[-1].response.id == events[0].response.id
    assert events[-1].response.error.message == "internal server error"


def test_the_usage_of_a_stream_may_be_asked_for():
    """Load generators do, though OpenAI defines this option for the chat route only."""
    body = ask(stream=True, stream_options={"include_usage": True})
    assert events_of(edge.call(edge.make_state(), PATH, body))[-1].response.usage.output_tokens == 6


def test_silence_is_filled_with_blank_lines():
    server = edge.make_state(fake_engine.FakeEngine(block_s=0.2))
    server.ping_interval_s = 0.01
    response = edge.call(server, PATH, ask(stream=True))
    assert response.text.startswith("\n\n")
    assert events_of(response)[-1].type == "response.incomplete"


def test_the_name_of_another_model_is_refused_if_names_are_strict():
    server = edge.make_state(strict_model_name=True)
    assert edge.call(server, PATH, ask()).status_code == 404
    assert edge.call(server, PATH, ask(model="fake-model")).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", PATH + "/resp_1"), ("DELETE", PATH + "/x")])
def test_stored_answers_do_not_exist(method, path):
    assert edge.call(edge.make_state(), path, method=method).status_code == 404


def test_the_history_of_tools_is_that_of_the_chat_route():
    function = {"name": "add", "arguments": "{}"}
    messages = [
        {"role": "developer", "content": "be"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    conversation = [
        messages[0],
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    engine = fake_engine.FakeEngine()
    server = edge.make_state(engine)
    chat = {"messages": messages, "max_tokens": 6}
    assert edge.call(server, "/v1/chat/completions", chat).status_code == 200
    answer_of(ask(input=conversation), engine)
    assert engine.seen_prompts[0] == engine.seen_prompts[1]
    assert b"add" in bytes(engine.seen_prompts[1])


def test_a_refusal_of_the_template_names_the_input():
    server = edge.make_state(
        fake_engine.FakeEngine(tokenizer=fake_engine.FakeTokenizer(has_chat_template=False))
    )
    response = edge.call(server, PATH, ask())
    assert (response.status_code, edge.error_of(response)["param"]) == (400, "input")
