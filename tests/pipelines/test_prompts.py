"""Prompts to ids: goldens, cuts that are told, the stand-in tokenizer, folders with faults."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import image_launches

from jdllm import errors
from jdllm.pipelines import prompts

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "images" / "z_image"
FOLDER = GOLDEN / "pipeline" / "tokenizer"
PROMPTS = {f"p{j}": prompt for j, prompt in enumerate(image_launches.PROMPTS)}
PROMPTS["neg"] = image_launches.NEGATIVE
VOCAB_SIZE = 572


@pytest.fixture(scope="module")
def tokenizer():
    return prompts.ChatTokenizer(FOLDER, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "text.npz") as file:
        return dict(file)


@pytest.mark.parametrize("limit", [512, 24])
@pytest.mark.parametrize("name", PROMPTS)
def test_ids_of_the_goldens(tokenizer, golden, name, limit):
    found = tokenizer.encode(PROMPTS[name], max_sequence_length=limit)
    expected = golden[f"{name}/ids{limit}"][golden[f"{name}/mask{limit}"] == 1]
    assert list(found.ids) == expected.tolist()
    assert found.num_cut == golden[f"{name}/mask512"].sum() - len(expected)


def framed(prefix_tokens, after="<|im_end|>"):
    return prompts.FramedTokenizer(
        FOLDER, vocab_size=VOCAB_SIZE, before="A b\n", after=after, prefix_tokens=prefix_tokens
    )


def test_a_prefix_comes_on_top_of_the_most_tokens(tokenizer):
    whole = framed(0).encode("A red bicycle.", max_sequence_length=99).ids
    for limit in (1, 3, 99):
        found = framed(4).encode("A red bicycle.", max_sequence_length=limit)
        assert found.ids == whole[: 4 + limit]
        assert found.num_cut == len(whole) - len(found.ids)
    im_end = tokenizer.encode("", max_sequence_length=99).ids[3]
    assert whole[-1] == im_end
    with pytest.raises(errors.RequestError, match="no token"):
        framed(99).encode("A red bicycle.", max_sequence_length=9)


def test_the_stand_in_has_a_prefix_too():
    plain = prompts.ByteTokenizer(vocab_size=300, offset=3)
    framed = prompts.ByteTokenizer(vocab_size=300, offset=3, prefix_tokens=5)
    own = plain.encode("abc", max_sequence_length=2)
    found = framed.encode("abc", max_sequence_length=2)
    assert found.ids == (3, 3, 3, 3, 3, *own.ids) and found.num_cut == own.num_cut == 2


def test_a_template_in_its_own_file_has_priority(tmp_path, tokenizer):
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    bare = prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    whole = tokenizer.encode("A red bicycle.", max_sequence_length=99).ids
    found = bare.encode("A red bicycle.", max_sequence_length=99).ids
    assert 0 < len(found) < len(whole)
    assert found == whole[3 : 3 + len(found)]
    with pytest.raises(errors.RequestError, match="no token") as error:
        bare.encode("", max_sequence_length=9)
    assert error.value.param == "prompt"


def test_a_template_hears_that_it_may_think(tmp_path, tokenizer):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ enable_thinking }}{{ messages | length }}")
    asked = prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    plain = prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    found = asked.encode("x", max_sequence_length=9)
    assert found == plain.encode("True1", max_sequence_length=9)


@given(st.text(), st.integers(1, 40))
def test_the_stand_in_loses_nothing_but_what_it_cuts(prompt, limit):
    tokenizer = prompts.ByteTokenizer(vocab_size=300, offset=44)
    found = tokenizer.encode(prompt, max_sequence_length=limit)
    expected = prompt.encode() + b"\n"
    assert bytes(i - 44 for i in found.ids) == expected[:limit]
    assert found.num_cut == len(expected) - len(found.ids)


@pytest.mark.parametrize(
    ("prompt", "limit", "param"),
    [(b"x", 9, "prompt"), ("a\ud800", 9, "prompt"), ("x", 0, "max_sequence_length")],
)
def test_what_cannot_be_encoded_is_named(tokenizer, prompt, limit, param):
    for one in (tokenizer, prompts.ByteTokenizer(vocab_size=256)):
        with pytest.raises(errors.RequestError) as error:
            one.encode(prompt, max_sequence_length=limit)
        assert error.value.param == param


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer.json", "{}", "tokenizer.json is no usable tokenizer"),
        ("special_tokens_map.json", '{"eos_token": 5}', "special_tokens_map.json: eos_token=5 mu"),
        ("tokenizer_config.json", "{}", "no chat template"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": ["a"]}', r"chat_template=\['a'\] must be"),
        ("chat_template.jinja", "{% if", "cannot be read: line 1"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_with_the_file(tmp_path, name, text, message):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(errors.ConfigError, match=message) as error:
        prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    assert str(tmp_path) in str(error.value)


def test_ids_must_be_in_the_vocabulary_of_the_encoder(tmp_path):
    split_into_parts(tmp_path)
    with pytest.raises(errors.ConfigError, match="largest id is 571.* vocabulary of 571"):
        prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(errors.ConfigError, match="largest id is 571.* vocabulary of 571"):
        prompts.ChatTokenizer(FOLDER, vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(errors.ConfigError, match="vocab_size=299"):
        prompts.ByteTokenizer(vocab_size=299, offset=44)


def split_into_parts(folder):
    """Puts the files of Qwen2's older class into a folder, instead of tokenizer.json."""
    whole = json.loads((FOLDER / "tokenizer.json").read_text())
    model, added = whole["model"], whole["added_tokens"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *map(" ".join, model["merges"])])
    )
    tokens = {token.pop("id"): token for token in added}
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "prompt", [*PROMPTS.values(), "Line\n\n end <|im_end|> 2512 Stück\tÅ", " ", "猫 \u0301e"]
)
def test_the_parts_of_a_tokenizer_give_the_same_ids(tmp_path, tokenizer, prompt):
    split_into_parts(tmp_path)
    parts = prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    found = parts.encode(prompt, max_sequence_length=512)
    assert found == tokenizer.encode(prompt, max_sequence_length=512)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("merges.txt", None, "tokenizer.json does not exist, nor do vocab.json and merges.txt"),
        ("vocab.json", "{", "is no usable tokenizer"),
        ("vocab.json", '{"a": 0}', "is no usable tokenizer: .*out of vocabulary"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_with_the_folder(tmp_path, name, text, message):
    split_into_parts(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(errors.ConfigError, match=message) as error:
        prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    assert str(tmp_path) in str(error.value)


def test_what_tokenizer_json_says_about_padding_has_no_effect(tmp_path, tokenizer):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    parsed = json.loads((FOLDER / "tokenizer.json").read_text())
    parsed["truncation"] = {
        "direction": "Left",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    parsed["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 556,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    padded = prompts.ChatTokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    for limit in (512, 6):
        found = padded.encode("A red bicycle.", max_sequence_length=limit)
        assert found == tokenizer.encode("A red bicycle.", max_sequence_length=limit)
