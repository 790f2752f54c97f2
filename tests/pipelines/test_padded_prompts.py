"""Padded prompts: ids of the goldens, cuts that keep the end, older folders, faults of folders."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import golden_flux as golden
from support.image_launches import NEGATIVE, PROMPTS

from jdllm import errors
from jdllm.pipelines import padded_prompts, tokenizer_files

PROMPT_OF = {"p0": PROMPTS[0], "p1": PROMPTS[1], "p2": PROMPTS[2], "neg": NEGATIVE}
CLIP, T5 = golden.STORED / "tokenizer", golden.STORED / "tokenizer_2"
BEGIN, END = 756, 757  # of CLIP
VOCAB_SIZES = {CLIP: 758, T5: 218}


@functools.cache
def tokenizer(folder):
    return reading(folder)


def reading(folder, of=None, **options):
    """Returns the tokenizer of a folder whose class is that of `of`."""
    own = folder if of is None else of
    of_class = {
        CLIP: {"pad_token": "<|endoftext|>", "read_parts": tokenizer_files.clip},
        T5: {"pad_token": "<pad>"},
    }[own]
    given = {"vocab_size": VOCAB_SIZES[own], **of_class, **options}
    return padded_prompts.PaddedTokenizer(folder, **given)


@pytest.mark.parametrize("name", PROMPT_OF)
def test_ids_of_the_goldens(name):
    text = golden.arrays("text")
    for folder, length, key in (
        (CLIP, 77, "clip_ids"),
        (T5, 64, "t5_ids64"),
        (T5, 512, "t5_ids512"),
    ):
        found = tokenizer(folder).encode(PROMPT_OF[name], max_sequence_length=length)
        assert list(found.ids) == text[f"{name}/{key}"].tolist()
        whole = tokenizer(folder).encode(PROMPT_OF[name], max_sequence_length=900).ids
        num_whole = whole.index(END if folder == CLIP else 1) + 1
        assert found.num_cut == max(0, num_whole - length)
    assert tokenizer(T5).encode(PROMPTS[2], max_sequence_length=64).num_cut > 50


@pytest.mark.parametrize("folder", [CLIP, T5], ids=["clip", "t5"])
def test_a_cut_keeps_the_end_token(folder):
    """What is left of a text is its beginning, and the end token stands behind it at once."""
    begin, end = ([BEGIN], END) if folder == CLIP else ([], 1)
    text = tokenizer(folder).encode(PROMPTS[2], max_sequence_length=900).ids
    own = text[len(begin) : text.index(end)]
    for length in (len(begin) + 1, 7, len(own) + len(begin), len(own) + len(begin) + 1):
        found = tokenizer(folder).encode(PROMPTS[2], max_sequence_length=length)
        kept = length - len(begin) - 1
        assert list(found.ids) == [*begin, *own[:kept], end]
        assert found.num_cut == len(own) - kept


def test_the_length_must_hold_what_is_added():
    with pytest.raises(errors.RequestError, match="max_sequence_length=1 must be between 2"):
        tokenizer(CLIP).encode("x", max_sequence_length=1)
    with pytest.raises(errors.RequestError, match="max_sequence_length=0 must be between 1"):
        tokenizer(T5).encode("x", max_sequence_length=0)


@pytest.mark.parametrize("prompt", [b"x", "a\ud800"])
def test_what_is_no_text_is_named(prompt):
    stand_in = padded_prompts.PaddedByteTokenizer(vocab_size=300, offset=3, end_id=1, pad_id=0)
    for one in (tokenizer(T5), stand_in):
        with pytest.raises(errors.RequestError) as error:
            one.encode(prompt, max_sequence_length=9)
        assert error.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [*PROMPTS, NEGATIVE, "DON'T \n\n stop <|endoftext|> 2512 Stück\tÅ", " ", "猫 \u0301e"],
)
def test_clips_parts_give_the_same_ids(tmp_path, prompt):
    """The published FLUX.1 has no tokenizer.json for CLIP."""
    shutil.copytree(CLIP, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    parts = reading(tmp_path, CLIP)
    for length in (77, 6):
        found = parts.encode(prompt, max_sequence_length=length)
        assert found == tokenizer(CLIP).encode(prompt, max_sequence_length=length)


def test_what_tokenizer_json_says_about_padding_has_no_effect(tmp_path):
    shutil.copytree(T5, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "tokenizer.json", truncation={
        "direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    })  # fmt: skip
    for length in (64, 3):
        found = reading(tmp_path, T5).encode(PROMPTS[1], max_sequence_length=length)
        assert found == tokenizer(T5).encode(PROMPTS[1], max_sequence_length=length)


def test_a_folder_may_name_another_pad(tmp_path):
    """As text, or as the object that older files hold."""
    shutil.copytree(CLIP, tmp_path, dirs_exist_ok=True)
    for pad in ("!", {"content": "!", "lstrip": False}):
        edit(tmp_path / "tokenizer_config.json", pad_token=pad)
        ids = reading(tmp_path, CLIP).encode("a", max_sequence_length=9).ids
        vocabulary = json.loads((CLIP / "vocab.json").read_text())
        assert ids[-6:] == (vocabulary["!"],) * 6
    (tmp_path / "tokenizer_config.json").unlink()
    found = reading(tmp_path, CLIP).encode("a", max_sequence_length=9)
    assert found == tokenizer(CLIP).encode("a", max_sequence_length=9)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("folder", "name", "changes", "message"),
    [
        (CLIP, "tokenizer_config.json", {"pad_token": "<none>"}, "pad_token='<none>' is no token"),
        (CLIP, "tokenizer.json", {"post_processor": None}, "adds no end token"),
        (CLIP, "tokenizer.json", {"model": {}}, "tokenizer.json is no usable tokenizer"),
        (CLIP, "tokenizer.json", None, "tokenizer.json does not exist, nor do vocab.json and"),
        (T5, "tokenizer.json", None, "does not exist, and a spiece.model alone is not read"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_with_the_file(
    tmp_path, folder, name, changes, message
):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if changes is None:
        (tmp_path / name).unlink()
        (tmp_path / "merges.txt").unlink(missing_ok=True)
        (tmp_path / "spiece.model").write_bytes(b"...")
    else:
        edit(tmp_path / name, **changes)
    with pytest.raises(errors.ConfigError, match=message) as error:
        reading(tmp_path, folder)
    assert str(tmp_path) in str(error.value)


def test_ids_must_be_in_the_vocabulary_of_the_encoder():
    with pytest.raises(errors.ConfigError, match="largest id is 757.* vocabulary of 757"):
        reading(CLIP, vocab_size=757)


@given(st.text(), st.integers(1, 40))
def test_the_stand_in_loses_nothing_but_what_it_cuts(prompt, length):
    stand_in = padded_prompts.PaddedByteTokenizer(vocab_size=300, offset=3, end_id=-1, pad_id=0)
    found = stand_in.encode(prompt, max_sequence_length=length)
    end = found.ids.index(299)
    assert bytes(one - 3 for one in found.ids[:end]) == prompt.encode()[: length - 1]
    assert found.ids[end + 1 :] == (0,) * (length - end - 1)
    assert found.num_cut == max(0, len(prompt.encode()) - length + 1)


def test_the_stand_in_needs_ids_for_bytes_and_an_end():
    with pytest.raises(errors.ConfigError, match="vocab_size=259 .* 3 to 258 and that of an end"):
        padded_prompts.PaddedByteTokenizer(vocab_size=259, offset=3, end_id=1, pad_id=0)
    padded_prompts.PaddedByteTokenizer(vocab_size=260, offset=3, end_id=1, pad_id=0)


def test_ids_of_two_tokenizers_stand_one_after_the_other():
    both = padded_prompts.JoinedTokenizer(tokenizer(CLIP), tokenizer(T5), first_length=20)
    found = both.encode(PROMPTS[2], max_sequence_length=30)
    first = tokenizer(CLIP).encode(PROMPTS[2], max_sequence_length=20)
    second = tokenizer(T5).encode(PROMPTS[2], max_sequence_length=30)
    assert found.ids == first.ids + second.ids
    assert found.num_cut == second.num_cut != first.num_cut
