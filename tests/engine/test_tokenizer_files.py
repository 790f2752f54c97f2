"""A wrong file of a tokenizer is named with its key, before a library trips over it."""

import json
import shutil

import pytest

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine import tokenizer


@pytest.mark.parametrize("content", [None, "{}", '{"version"'], ids=["none", "empty", "cut"])
def test_a_folder_without_its_tokenizer_file_says_so_in_one_line(content, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(source.bundled_model() / name, tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(errors.ConfigError) as caught:
        tokenizer.Tokenizer(tmp_path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"no usable tokenizer at {tmp_path}: ")
    assert ("holds none of tokenizer.json" in text) == (content is None)
    assert ("tokenizer_path" in text) == (content is None)
    assert "Error: " in text  # the kind says what a bare key does not


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", '{"eos', "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", {"eos_token": 5}, "tokenizer_config.json: eos_token=5 must be"),
        ("tokenizer_config.json", {"chat_template": ""}, "tokenizer_config.json: the chat templ"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "<a>"}}},
            "tokenizer_config.json: added_tokens_decoder.'x': its key must be a token's id",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"5": 3}},
            "tokenizer_config.json: added_tokens_decoder.'5'=3 must be a text",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": None},
            "tokenizer_config.json: added_tokens_decoder=None is no object",
        ),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": ["<a>", 5]},
            "tokenizer_config.json: additional_special_tokens[1]=5 must be a text",
        ),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": "<a>"},
            "tokenizer_config.json: additional_special_tokens='<a>' is no list",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": 5},
            "tokenizer_config.json: chat_template=5 must be a text, or a list of objects",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": ["a"]},
            "tokenizer_config.json: chat_template=['a'] must be a text, or a list of objects",
        ),
        ("special_tokens_map.json", '{"eos', "special_tokens_map.json is not valid JSON"),
        (
            "special_tokens_map.json",
            {"pad_token": {"text": "x"}},
            "special_tokens_map.json: pad_token={'text': 'x'} must be a text, or an object",
        ),
        ("added_tokens.json", {"<x>": "y"}, "added_tokens.json: '<x>'='y' must be a token's id"),
        ("tokenizer.json", '{"version"', "(tokenizer.json: "),
        ("chat_template.jinja", "", "chat_template.jinja: the chat template is empty"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: the chat template cannot be"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(name, content, words, tmp_path):
    for kept in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source.bundled_model() / kept, tmp_path)
    file = tmp_path / name
    if isinstance(content, dict):
        content = json.dumps(source.read_optional_json(file) | content)
    file.write_text(content)
    with pytest.raises(errors.ConfigError) as caught:
        tokenizer.Tokenizer(tmp_path)
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_template_of_the_user_stands_for_an_empty_one_and_may_not_be_empty_itself(tmp_path):
    for kept in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source.bundled_model() / kept, tmp_path)
    own = tmp_path / "chat_template.jinja"
    own.write_text("")
    assert tokenizer.Tokenizer(tmp_path, chat_template="{{ messages }}").has_chat_template
    with pytest.raises(errors.ConfigError, match=r"chat_template='.*\.jinja': .* is empty"):
        tokenizer.Tokenizer(tmp_path, chat_template=str(own))
