"""Conversations that began elsewhere: nothing of them is lost, whatever the template knows."""

from __future__ import annotations

import pytest
from support import chat_templates, edge, fake_engine

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine import tokenizer
from jdllm.templates import chat, conversations

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CALL = {
    "id": "call_7",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "And Köln?", "name": "Ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_7", "content": [{"type": "text", "text": "rain"}]},
]
PLAIN = (
    "<system>Be brief.<user>Ann: And Köln?"
    '<assistant>Tool call: {"id": "call_7", "name": "weather", "arguments": {"city": "Köln"}}'
    "<user>Tool result (call_7):\nrain"
)


def prompt_of(body, path=CHAT):
    """Returns the prompt that the engine got, as text."""
    engine = fake_engine.FakeEngine()
    response = edge.call(edge.make_state(engine), path, {"max_tokens": 4} | body)
    assert response.status_code == 200, response.text
    return bytes(engine.seen_prompts[0]).decode()


def rendered(template, messages):
    made = chat.ChatTemplate(template)
    return made.render(conversations.for_template(messages, made.abilities))


def test_a_template_that_knows_no_tools_gets_plain_text():
    assert prompt_of({"messages": HISTORY}) == PLAIN


def test_the_bundled_model_takes_such_a_conversation():
    bundled = tokenizer.Tokenizer(source.bundled_model())
    turns = [{**m, "content": "rain"} if m["role"] == "tool" else m for m in HISTORY]
    text = bundled.decode(bundled.apply_chat_template(turns), skip_special_tokens=False)
    assert text == (
        "<role>SYSTEM</role>Be brief.<|role_end|><role>HUMAN</role>Ann: And Köln?<|role_end|>"
        '<role>ASSISTANT</role>Tool call: {"id": "call_7", "name": "weather", "arguments": '
        '{"city": "Köln"}}<|role_end|><role>HUMAN</role>Tool result (call_7):\nrain<|role_end|>'
        "<role>ASSISTANT</role>"
    )


def test_a_template_that_knows_tools_writes_them_itself():
    turns = [{**m, "content": "rain"} if m["role"] == "tool" else m for m in HISTORY]
    text = rendered(chat_templates.TOOLS, turns)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert "Tool call:" not in text
    assert "Ann: And Köln?" in text  # this one does not know names
    text = rendered(chat_templates.TEXT_ARGUMENTS, turns)
    assert '[CALL call_7]weather({"city": "Köln"})' in text
    assert "[RESULT call_7]rain[/RESULT]" in text
    assert "[user Ann]And Köln?" in text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]},
         "Hm.\n" + "\n".join(['Tool call: {"id": "call_7", "name": "weather", "arguments": '
                              '{"city": "Köln"}}'] * 2)),
        ({"role": "assistant", "content": "", "tool_calls": []}, ""),
        ({"role": "function", "name": "weather", "content": "rain"},
         "Tool result (weather):\nrain"),
        ({"role": "tool", "content": ""}, "Tool result:\n"),
        ({"role": "assistant", "content": "x",
          "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "not JSON"}}]},
         'x\nTool call: {"id": "c", "name": "f", "arguments": "not JSON"}'),
    ],
)  # fmt: skip
def test_plain_text_of(message, text):
    user = "user" if message["role"] != "assistant" else "assistant"
    assert prompt_of({"messages": [message]}) == f"<{user}>{text}"


def bad_call(**changes):
    return [{"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "messages.0.tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "c"}], "messages.0.tool_call_id"),
        ([{"role": "assistant", "content": "x", "reasoning": 5}], "messages.0.reasoning"),
        ([{"role": "tool", "content": None, "tool_call_id": "c"}], "messages.0.content"),
        (bad_call(function={"arguments": "{}"}), "messages.0.tool_calls"),
        (bad_call(function=None), "messages.0.tool_calls"),
        (bad_call(function={"name": "f", "arguments": 5}), "messages.0.tool_calls"),
        ([{"role": "user", "content": "x", "reasoning_content": "hm"}],
         "messages.0.reasoning_content"),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages.0.refusal"),
        ([{"role": "user", "content": "x", "nmae": "Ann"}], "messages.0.nmae"),
    ],
)  # fmt: skip
def test_what_no_message_can_mean_is_refused_by_name(messages, param):
    response = edge.call(edge.make_state(), CHAT, {"messages": messages})
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_no_hint_names_the_field_that_is_refused(role, name):
    message = {"role": role, "content": "x", name: "hm"}
    response = edge.call(edge.make_state(), CHAT, {"messages": [message]})
    assert edge.error_of(response)["message"] == f"only messages of the assistant have {name}"


def test_a_call_that_is_nested_too_deeply_is_a_400():
    arguments: dict = {}
    for _ in range(900):
        arguments = {"x": arguments}
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    deep = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    response = edge.call(edge.make_state(), CHAT, {"messages": deep, "max_tokens": 4})
    assert response.status_code in (200, 400)
    turns = [{**deep[0], "tool_calls": [call]}]
    for _ in range(20_000):
        arguments = {"x": arguments}
    turns[0]["tool_calls"] = [{**CALL, "function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(errors.RequestError, match="nested too deeply"):
        conversations.for_template(turns, chat.ChatTemplate("x").abilities)


@pytest.mark.parametrize(
    "name", ["self", "messages", "conversation", "tokenize", "tools", "kwargs"]
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_template_variable_of_the_renderers_own_is_refused(path, name):
    body = {"messages": HISTORY[:2], "chat_template_kwargs": {name: "x"}}
    response = edge.call(edge.make_state(), path, body)
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == f"chat_template_kwargs.{name}"


def test_tools_with_tool_choice_none_are_accepted_and_not_listed():
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "tools": [TOOL], "parallel_tool_calls": False}
    assert prompt_of(body | {"tool_choice": "none"}) == "<user>hi"
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, param in (
        (None, "tools"), ("auto", "tools"), ("required", "tool_choice"), (named, "tool_choice"),
    ):  # fmt: skip
        response = edge.call(edge.make_state(), CHAT, body | {"tool_choice": choice})
        assert response.status_code == 400
        assert edge.error_of(response)["param"] == param


def test_options_of_a_model_that_does_not_reason():
    messages = [{"role": "user", "content": "hi"}]
    prompt_of({"messages": messages, "reasoning_effort": "none", "verbosity": "medium"})
    for name, value in (("reasoning_effort", "low"), ("verbosity", "high")):
        response = edge.call(edge.make_state(), CHAT, {"messages": messages, name: value})
        assert edge.error_of(response)["param"] == name


def test_a_final_message_can_be_continued():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "continue_final_message": True}
    assert prompt_of(body) == "<user>hi<assistant>Once"
    response = edge.call(edge.make_state(), CHAT, body | {"add_generation_prompt": True})
    assert edge.error_of(response)["param"] == "continue_final_message"


# max_tokens: 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_request_for_no_tokens_counts_its_prompt_and_runs_nothing(path, name):
    if path == TEXT and name != "max_tokens":
        return
    engine = fake_engine.FakeEngine()
    least = {"prompt": ["hi", "ho!"]} if path == TEXT else {"messages": HISTORY[:1]}
    body = {**least, name: 0, "n": 2}
    response = edge.call(edge.make_state(engine), path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert engine.seen_prompts == []
    assert [one["index"] for one in answer["choices"]] == list(range(4 if path == TEXT else 2))
    for one in answer["choices"]:
        assert one["finish_reason"] == "length"
        assert (one["text"] if path == TEXT else one["message"]["content"]) == ""
    prompt = 5 if path == TEXT else len("<system>Be brief.")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 0)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    frames = edge.frames(edge.call(edge.make_state(engine), path, body))
    assert frames[-1]["usage"]["prompt_tokens"] == prompt
    ends = [c["finish_reason"] for f in frames for c in f["choices"] if c["finish_reason"]]
    assert ends == ["length"] * len(answer["choices"])


def test_a_request_for_no_tokens_is_checked_as_any_other():
    for extra, param in (({"temperature": -1}, "temperature"), ({"dllm": {"x": 1}}, "dllm.x")):
        response = edge.call(edge.make_state(), TEXT, {"prompt": "hi", "max_tokens": 0} | extra)
        assert response.status_code == 400
        assert edge.error_of(response)["param"] == param
    long = {"prompt": "x" * (fake_engine.CONTEXT + 1), "max_tokens": 0}
    error = edge.error_of(edge.call(edge.make_state(), TEXT, long))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]
    long["prompt"] = "x" * fake_engine.CONTEXT
    assert edge.call(edge.make_state(), TEXT, long).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate"])
def test_an_overflow_has_openais_words_and_code(path, stream):
    long = "x" * 600
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": long}], "max_tokens": 4},
        TEXT: {"prompt": long, "max_tokens": 4},
        "/generate": {"text": long, "sampling_params": {"max_new_tokens": 4}},
    }
    error = edge.error_of(edge.call(edge.make_state(), path, bodies[path] | {"stream": stream}))
    assert "This model's maximum context length is 512 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


# /tokenize with vLLM's fields


def tokens(**body):
    response = edge.call(edge.make_state(), "/tokenize", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokenize_with_the_fields_of_vllm():
    answer = tokens(prompt="hi", return_token_strs=True, add_special_tokens=False)
    assert answer == {"tokens": [104, 105], "count": 2, "max_model_len": 512,
                      "token_strs": ["h", "i"]}  # fmt: skip
    assert "token_strs" not in tokens(prompt="hi", return_token_strs=False)
    many = tokens(prompt=["hi", "o"], return_token_strs=True)
    assert many["token_strs"] == [["h", "i"], ["o"]]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once"}]
    answer = tokens(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert bytes(answer["tokens"]).decode() == "<user>hi<assistant>Once"
    assert tokens(messages=messages, chat_template_kwargs={"shout": True})["tokens"][1] == ord("U")
    for body, param in (
        ({"messages": messages, "tools": [TOOL]}, "tools"),  # the fake's template lists none
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": messages, "chat_template": "x"}, "chat_template"),
        ({"messages": messages, "add_generation_prompt": 1}, "add_generation_prompt"),
    ):
        response = edge.call(edge.make_state(), "/tokenize", body)
        assert response.status_code == 400
        assert edge.error_of(response)["param"] == param
    assert tokens(messages=messages, tools=[TOOL], tool_choice="none")["count"] > 0


def test_token_strings_are_the_entries_of_the_vocabulary():
    bundled = tokenizer.Tokenizer(source.bundled_model())
    ids = bundled.encode("Tom has 7 apples.")
    strings = bundled.token_strings(ids)
    assert [bundled.token_id(one) for one in strings] == ids
    messages = [{"role": "user", "content": "hi"}]
    with_prompt = bundled.apply_chat_template(messages)
    without = bundled.apply_chat_template(messages, add_generation_prompt=False)
    assert with_prompt[: len(without)] == without
    assert len(with_prompt) > len(without)
