"""Answers that clients send back, with all that came beside the text, make the prompt of the text.

The messages are those of the `openai` package, and fields that litellm, OpenRouter, vLLM and
Anthropic's SDK are known to send.
"""

from __future__ import annotations

import itertools
import random

import pytest
from openai.types import chat as openai_chat
from openai.types import responses as openai_responses
from support import chat_templates, edge, fake_engine

from jdllm import errors
from jdllm.server.openai.responses import items
from jdllm.templates import chat, conversations

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# Each alone and many together beside an assistant's text.
HINTS = {
    "annotations": [{"type": "url_citation", "url_citation": {"url": "x"}}],
    "audio": None,
    "cache_control": {"type": "ephemeral"},
    "function_call": None,
    "id": "msg_1",
    "images": [],
    "parsed": {"a": 1},
    "phase": "commentary",
    "prefix": False,
    "provider_specific_fields": {"refusal": None},
    "reasoning": "hm",
    "reasoning_content": "hm",
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "refusal": None,
    "status": "completed",
    "thinking": "hm",
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    "tool_calls": [],
}
EMPTY_CONTENTS = ({}, {"content": None}, {"content": ""}, {"content": []})
# What asks for another answer, and the fields that are named.
ASKING = [
    ({"audio": {"id": "audio_1"}}, "audio"),
    ({"refusal": "No."}, "refusal"),
    ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
    ({"images": ["aa"]}, "images"),
    ({"prefix": True}, "prefix"),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "content.0"),
    ({"content": [{"type": "text", "text": "x", "mood": 1}]}, "content.0.mood"),
    ({"content": [{"type": "text", "text": "x", "role": "user"}]}, "content.0.role"),
    ({"content": 0}, "content"),
]


def seen_by_chat(messages) -> str:
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), CHAT, {"messages": messages, "max_tokens": 4})
    assert response.status_code == 200, response.text
    return bytes(engine.seen_prompts[0]).decode()


def seen_by_tokenize(messages) -> str:
    response = edge.call(edge.make_state(), "/tokenize", {"messages": messages})
    assert response.status_code == 200, response.text
    return bytes(response.json()["tokens"]).decode()


def seen_offline(messages) -> str:
    return bytes(fake_engine.FakeTokenizer().apply_chat_template(messages)).decode()


SEEN = {"chat": seen_by_chat, "tokenize": seen_by_tokenize, "offline": seen_offline}


@pytest.mark.parametrize("way", SEEN)
def test_an_assistants_turn_without_text_is_an_empty_one(way):
    prompts = {
        SEEN[way]([USER, {"role": "assistant", **content}, USER]) for content in EMPTY_CONTENTS
    }
    dump = openai_chat.ChatCompletionMessage(role="assistant", content=None).model_dump()
    prompts.add(SEEN[way]([USER, dump, USER]))
    assert prompts == {"<user>hi<assistant><user>hi"}


@pytest.mark.parametrize("way", SEEN)
def test_hints_beside_a_text_change_nothing(way):
    rng = random.Random(7)
    said = {"role": "assistant", "content": "yes"}
    chosen = [dict([pair]) for pair in HINTS.items()]
    chosen += [dict(rng.sample(sorted(HINTS.items(), key=str), 6)) for _ in range(10)]
    for hints in chosen:
        assert SEEN[way]([USER, said | hints]) == "<user>hi<assistant>yes", hints
    text = {"type": "text", "text": "yes", "cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    turn = said | {"content": [thought, text | {"annotations": [], "citations": None}]}
    asked = {"role": "user", "content": [text | {"role": "user"}]}  # as @openai/agents sends it
    assert SEEN[way]([asked, turn]) == "<user>yes<assistant>yes"


@pytest.mark.parametrize(("fields", "name"), ASKING, ids=[name for _, name in ASKING])
@pytest.mark.parametrize("before", [0, 3])
def test_what_would_change_the_answer_is_refused_with_its_place(fields, name, before):
    said = {"role": "assistant", "content": "yes", **fields}
    messages = [*itertools.repeat(USER, before), said]
    for path in (CHAT, "/tokenize"):
        response = edge.call(edge.make_state(), path, {"messages": messages})
        assert response.status_code == 400
        assert edge.error_of(response)["param"] == f"messages.{before}.{name}"
    with pytest.raises(errors.RequestError) as refused:
        seen_offline(messages)
    assert refused.value.param == f"messages.{before}.{name}"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("content", EMPTY_CONTENTS[:2], ids=["missing", "null"])
def test_a_missing_content_of_others_is_an_error_with_its_place(role, content):
    messages = [USER, {"role": role, **content}]
    response = edge.call(edge.make_state(), CHAT, {"messages": messages})
    assert edge.error_of(response)["param"] == "messages.1.content"
    with pytest.raises(errors.RequestError) as refused:
        seen_offline(messages)
    assert refused.value.param == "messages.1.content"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_template_that_reads_reasoning_gets_it_under_any_name(name):
    made = chat.ChatTemplate(chat_templates.TOOLS)
    turns = [USER, {"role": "assistant", "content": "yes", name: "hm"}]
    assert "<think>hm</think>yes" in made.render(conversations.for_template(turns, made.abilities))


def test_a_template_gets_the_hints_that_it_reads():
    made = chat.ChatTemplate("{% for m in messages %}[{{ m.metadata }}]{{ m.content }}{% endfor %}")
    turns = conversations.for_template([USER | {"metadata": "x", "id": "7"}], made.abilities)
    assert turns == [USER | {"metadata": "x"}]


# /v1/responses


def test_the_items_of_an_answer_with_reasoning_can_be_sent_back():
    thought = openai_responses.ResponseReasoningItem.model_validate(
        {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "in short"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": "xyz",
            "status": "completed",
        }
    )
    cited = {"type": "url_citation", "url": "x", "title": "x", "start_index": 0, "end_index": 1}
    said = openai_responses.ResponseOutputMessage.model_validate(
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "yes", "annotations": [cited]}],
        }
    )
    history = [USER, thought.model_dump(), said.model_dump(), USER]
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), "/v1/responses", {"input": history})
    assert response.status_code == 200, response.text
    assert bytes(engine.seen_prompts[0]).decode() == "<user>hi<assistant>yes<user>hi"


EMPTY_THOUGHT = {"type": "reasoning", "summary": []}


def test_reasoning_alone_is_no_input():
    response = edge.call(edge.make_state(), "/v1/responses", {"input": [EMPTY_THOUGHT] * 2})
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == "input"


def test_reasoning_items_belong_to_the_turn_that_follows():
    thought = {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]}
    summary = {"type": "reasoning", "summary": [{"text": "so"}]}
    said = {"role": "assistant", "content": "yes"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    turn = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    for history, turns in (
        ([USER, thought, said], [USER, turn]),
        ([thought, said, call], [turn | {"tool_calls": [CALL]}]),
        ([thought, said, summary, call],
         [turn | {"tool_calls": [CALL], "reasoning_content": "hm\nso"}]),
        ([summary, call], [{"role": "assistant", "content": None, "tool_calls": [CALL],
                            "reasoning_content": "so"}]),
        ([thought, summary, EMPTY_THOUGHT, said], [turn | {"reasoning_content": "hm\nso"}]),
        ([said, thought, summary, call],
         [said | {"tool_calls": [CALL], "reasoning_content": "hm\nso"}]),
        ([thought, USER, said], [USER, said]),
        ([said, thought], [said]),
    ):  # fmt: skip
        assert [turn for _, turn in items.turns(history, None)] == turns


@pytest.mark.parametrize("content", EMPTY_CONTENTS, ids=str)
def test_an_items_missing_content_is_empty_for_the_assistant_alone(content):
    engine = fake_engine.FakeEngine()
    body = {"input": [USER, {"role": "assistant", **content}, USER]}
    response = edge.call(edge.make_state(engine), "/v1/responses", body)
    assert response.status_code == 200, response.text
    assert bytes(engine.seen_prompts[0]).decode() == "<user>hi<assistant><user>hi"
    if content.get("content") == "":
        return
    body = {"input": [USER, {"role": "user", **content}]}
    response = edge.call(edge.make_state(), "/v1/responses", body)
    assert edge.error_of(response)["param"] == "input.1.content"


# /api/chat


def test_messages_of_ollama_can_be_sent_back():
    said = {"role": "assistant", "content": "yes", "thinking": "hm", "images": [], "id": "7",
            "tool_calls": [], "tool_name": None, "provider_specific_fields": {}}  # fmt: skip
    for turn in (said, said | {"images": None, "tool_calls": None}):
        engine = fake_engine.FakeEngine()
        body = {"model": "m", "messages": [USER, turn, USER], "stream": False}
        response = edge.call(edge.make_state(engine), "/api/chat", body)
        assert response.status_code == 200, response.text
        assert bytes(engine.seen_prompts[0]).decode() == "<user>hi<assistant>yes<user>hi"
