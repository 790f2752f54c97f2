"""One renderer for all: the same text as transformers', and clear errors for a bad template."""

from __future__ import annotations

import inspect
import pathlib

import pytest
import transformers
from support import chat_templates
from transformers.utils import chat_template_utils

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine import tokenizer
from jdllm.templates import chat, conversations

ASSETS = pathlib.Path(source.bundled_model()).parent
BUNDLED = {path.parent.name: path.read_text() for path in ASSETS.glob("*/chat_template.jinja")}
QUESTION = [{"role": "user", "content": "How many?"}]
CONVERSATIONS = {
    "question": QUESTION,
    "blanks": [{"role": "user", "content": "  <b>hé\n\n 北京 & \N{PILE OF POO} \n"}],
    "turns": [
        {"role": "system", "content": " Be kind. "},
        {"role": "user", "content": "1 < 2?"},
        {"role": "assistant", "content": "<think>hm</think>\n\nYes.", "reasoning_content": "hm"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <how> it is",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def called(arguments):
    function = {"name": "weather", "arguments": arguments}
    return [
        *QUESTION,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "call_7", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_7", "name": "weather"},
    ]


def theirs(template, messages, **variables):
    """Returns what transformers renders."""
    options = {"add_generation_prompt": True, "bos_token": "<s>"} | variables
    texts, _ = chat_template_utils.render_jinja_template(
        conversations=[messages], chat_template=template, **options
    )
    return texts[0]


def ours(template, messages, variables=None, **options):
    made = chat.ChatTemplate(template, special_tokens={"bos_token": "<s>"})
    return made.render(messages, variables=variables, **options)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("name", [*chat_templates.ALL, *BUNDLED])
def test_the_text_is_that_of_transformers(name, messages):
    template = (chat_templates.ALL | BUNDLED)[name]
    for prompt in (True, False):
        wanted = theirs(template, messages, add_generation_prompt=prompt)
        assert ours(template, messages, add_generation_prompt=prompt) == wanted
        assert messages[0]["content"].strip()[:3] in wanted or name == "headers"


def test_variables_and_tools_reach_the_template_as_in_transformers():
    off = {"enable_thinking": False}
    wanted = theirs(chat_templates.CHATML, QUESTION, **off)
    assert "<think>" in wanted
    assert ours(chat_templates.CHATML, QUESTION, off) == wanted
    for template in (chat_templates.TOOLS, chat_templates.HEADERS):
        wanted = theirs(template, QUESTION, tools=[TOOL], date="1 May")
        assert "Says <how> it is" in wanted
        assert ours(template, QUESTION, {"date": "1 May"}, tools=[TOOL]) == wanted
    # A variable of a request takes the place of a special token, as in transformers.
    assert ours(chat_templates.HEADERS, QUESTION, {"bos_token": "B"}).startswith("B")


@pytest.mark.parametrize(
    ("template", "messages"),
    [(chat_templates.TOOLS, called({"city": "Köln"})),
     (chat_templates.TEXT_ARGUMENTS, called('{"city": "Köln"}'))],
    ids=["objects", "text"],
)  # fmt: skip
def test_tool_calls_are_those_of_transformers_whatever_form_they_came_in(template, messages):
    wanted = theirs(template, messages)
    abilities = chat.ChatTemplate(template).abilities
    assert abilities.tool_role
    for arguments in ({"city": "Köln"}, '{"city": "Köln"}'):
        turns = conversations.for_template(called(arguments), abilities)
        assert ours(template, turns) == wanted


@pytest.mark.parametrize("template", [*chat_templates.ALL.values(), *BUNDLED.values()])
@pytest.mark.parametrize("final", ["Once upon", "Once upon \n", " x"])
def test_a_continued_message_ends_the_text_as_in_transformers(template, final):
    messages = [*QUESTION, {"role": "assistant", "content": final}]
    wanted = theirs(template, messages, add_generation_prompt=False, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours(template, messages, **options) == wanted
    assert wanted.rstrip().endswith(final.strip())


@pytest.mark.parametrize(
    ("template", "final"),
    [("{% for m in messages %}{{ m.role }}{% endfor %}", "x"), (chat_templates.CHATML, " ")],
)
def test_a_message_that_cannot_be_continued_is_refused(template, final):
    messages = [*QUESTION, {"role": "assistant", "content": final}]
    with pytest.raises(errors.RequestError) as refused:
        ours(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_the_reserved_variables_are_all_that_transformers_takes():
    apply = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template)
    render = inspect.signature(chat_template_utils.render_jinja_template)
    assert {*apply.parameters, *render.parameters, "messages"} <= chat.RESERVED_VARIABLES


@pytest.mark.parametrize("name", sorted(chat.RESERVED_VARIABLES))
def test_a_reserved_variable_is_refused_by_name(name):
    with pytest.raises(errors.RequestError) as refused:
        ours(chat_templates.CHATML, QUESTION, {name: "x"})
    assert refused.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("name", ["source", "context", "args", "l_0_messages", "not a name", ""])
def test_any_other_variable_is_data(name):
    assert ours("{{ messages[0].content }}", QUESTION, {name: "x"}) == "How many?"


def test_objects_do_not_reach_the_template():
    for value in (object(), open, {"x": [pathlib.Path()]}):
        with pytest.raises(errors.RequestError, match="JSON's types"):
            ours(chat_templates.CHATML, QUESTION, {"x": value})
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(errors.RequestError, match="nested too deeply"):
        ours(chat_templates.CHATML, QUESTION, {"x": deep})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[7].content.x }}", "undefined|no element"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('long ' * 1000) }}", "long long"),
        ("{% if messages[0].content == 'How many?' %}{{ 1 / 0 }}{% endif %}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_refuses_is_one_short_line(template, reason):
    with pytest.raises(errors.RequestError, match=reason) as refused:
        ours(template, QUESTION)
    assert refused.value.param == "messages"
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "line 1"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "without end"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{{ messages | urlize }}", "urlize"),
        ("x" * 2**21, "characters"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_start(template, reason, tmp_path):
    with pytest.raises(errors.ConfigError, match=reason):
        ours(template, QUESTION)
    path = tmp_path / "broken.jinja"
    path.write_text(template)
    with pytest.raises(errors.ConfigError, match=reason):
        tokenizer.Tokenizer(source.bundled_model(), chat_template=str(path))
