"""Datasets: lengths, files in every form, and what is said of a bad file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jdllm import errors
from jdllm.bench import prompts


class ByteTokenizer:
    """One token per byte; 0 begins every text that asks for special tokens."""

    def __len__(self):
        return 256

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + list(text.encode())

    def decode(self, ids, *, skip_special_tokens=True):
        return bytes(ids).decode("latin-1")

    def apply_chat_template(self, messages):
        return [1, *"".join(m["content"] for m in messages).encode()]


def load(**options):
    return prompts.Dataset(**options).load(ByteTokenizer)


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_random_lengths_are_sglangs_for_the_same_seed(ratio):
    options = {"num_prompts": 9, "input_len": 40, "output_len": 20, "range_ratio": ratio}
    found = load(name="random-ids", as_ids=True, seed=3, **options)
    np.random.seed(3)  # what SGLang's compute_random_lens reads
    inputs = np.random.randint(max(int(40 * ratio), 1), 41, size=9).tolist()
    outputs = np.random.randint(max(int(20 * ratio), 1), 21, size=9).tolist()
    assert [len(one.content) for one in found] == [one.prompt_len for one in found] == inputs
    assert [one.output_len for one in found] == outputs


def test_random_ids_lie_in_the_vocabulary_and_need_no_tokenizer():
    dataset = prompts.Dataset(name="random-ids", num_prompts=5, as_ids=True, vocab_size=50)
    found = dataset.load(lambda: pytest.fail("a tokenizer was asked for"))
    assert all(0 <= token < 50 for one in found for token in one.content)
    assert len({tuple(one.content[:3]) for one in found}) > 1


def test_random_text_is_cut_from_bundled_problems_which_differ():
    found = load(num_prompts=4, input_len=300, range_ratio=1.0)
    assert all(isinstance(one.content, str) and len(one.content) == 299 for one in found)
    assert len({one.content[:40] for one in found}) == 4
    assert load(num_prompts=4, input_len=300, range_ratio=1.0) == found
    assert [
        len(one.content) for one in load(num_prompts=2, input_len=9, range_ratio=1, as_ids=True)
    ]


def test_random_text_of_a_file_is_repeated_to_length(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "abc"})
    (one,) = load(path=path, num_prompts=1, input_len=7, range_ratio=1.0, as_ids=True)
    assert bytes(one.content) == b"abcabca"


def test_files_in_every_form(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "text", "max_tokens": 3},
        {"question": "how many?", "output_len": 4},
        {"input_ids": [5, 6], "max_new_tokens": 5},
        {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 6},
        {"conversations": [{"value": "ask"}, {"value": "answer"}]},
        {"conversations": [{"value": "no answer"}]},
    )
    found = load(name="openai", path=path)
    assert [one.output_len for one in found] == [3, 4, 5, 6, 6]
    assert found[0].content == "text"
    assert found[2].content == [5, 6]
    assert found[3].content == [{"role": "user", "content": "hi"}]
    assert (found[4].content, found[4].prompt_len) == ("ask", 4)
    ids = load(name="openai", path=path, as_ids=True, fixed_output_len=9)
    assert [one.output_len for one in ids] == [9] * 5
    assert ids[0].content == [0, *b"text"]
    assert ids[3].content == [1, *b"hi"]


def test_sharegpt_is_an_array_shuffled_by_the_seed(tmp_path):
    path = tmp_path / "s.json"
    rows = [{"conversations": [{"value": f"ask {i}"}, {"value": "answer"}]} for i in range(20)]
    path.write_text(json.dumps(rows))
    found = load(name="sharegpt", path=str(path), num_prompts=5, seed=1)
    assert len(found) == 5
    assert found == load(name="sharegpt", path=str(path), num_prompts=5, seed=1)
    assert found != load(name="sharegpt", path=str(path), num_prompts=5, seed=2)


def test_options_of_files(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "abc", "max_tokens": 3})
    (one,) = load(name="custom", path=path, suffix="!")
    assert one.content == "abc!"
    (one,) = load(name="custom", path=path, apply_chat_template=True)
    assert one.content == [1, *b"abc"]
    assert load(name="custom", path=path, context_len=7)
    with pytest.raises(errors.ConfigError, match="no prompt that fits"):
        load(name="custom", path=path, context_len=6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "max_tokens": 1}\n{bad', r"p.jsonl:2 is not valid JSON"),
        ("[1, 2]", "row 1 .* is not a JSON object"),
        ('{"other": 1}', "has none of conversations, messages, prompt"),
        ('{"prompt": ""}', "prompt must be text"),
        ('{"prompt": "a"}', "give --sharegpt-output-len"),
        ('{"prompt": "a", "max_tokens": 0}', "0 is not a positive number"),
        ('{"conversations": [{"value": 3}, {"value": "a"}]}', "a turn needs text"),
        ("", "no prompt that fits"),
    ],
)
def test_a_bad_file_is_named_with_its_row(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(errors.ConfigError, match=message):
        load(name="custom", path=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sharegpt"}, "needs --dataset-path FILE"),
        ({"name": "custom", "path": "/nowhere/p.jsonl"}, "cannot read --dataset-path"),
        ({"name": "random-ids", "path": "p"}, "--dataset-path is not used"),
        ({"apply_chat_template": True}, "--apply-chat-template is for prompts of a file"),
        ({"suffix": "x"}, "--prompt-suffix is for"),
        ({"fixed_output_len": 3}, "--sharegpt-output-len is for"),
        ({"context_len": 3}, "--sharegpt-context-len is for"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        load(**options)
