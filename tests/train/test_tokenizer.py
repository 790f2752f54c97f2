"""The bundled tokenizer: byte-complete, single digits, and the template training uses."""

import pathlib

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.tasks import arithmetic, words
from jdllm.train import examples

NANO = pathlib.Path(examples.__file__).parents[1] / "assets" / "jdllm-nano"
ENCODER = examples.ChatFormat(NANO).tokenizer
TOM = "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(NANO)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(text):
    ids = ENCODER.encode(text, add_special_tokens=False).ids
    assert ENCODER.decode(ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token(tokenizer):
    assert set(transformers.convert_slow_tokenizer.bytes_to_unicode().values()) <= set(
        tokenizer.get_vocab()
    )


def test_digits_are_single_tokens(tokenizer):
    for text in ("1234567890", "x12y345", "<<99+101=200>>200", "$5,000"):
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
        for piece in pieces:
            assert not any(c.isdigit() for c in piece) or len(piece) == 1, pieces
    assert not [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c.isdigit() for c in t)]


def test_special_ids_agree_with_the_config(tokenizer):
    assert tokenizer.mask_token_id == 2
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1
    assert tokenizer.convert_tokens_to_ids("<|role_end|>") == 5


def test_training_prompt_is_the_chat_template(tokenizer):
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": TOM}], add_generation_prompt=True, return_dict=False
    )
    assert examples.ChatFormat(NANO).prompts([TOM]) == [list(served)]
    assert tokenizer.decode(served).endswith("<|role_end|><role>ASSISTANT</role>")


def test_template_writes_system_and_earlier_turns(tokenizer):
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<role>SYSTEM</role>S<|role_end|><role>HUMAN</role>U<|role_end|>"
        "<role>ASSISTANT</role>A<|role_end|>"
    )


@pytest.mark.campaign
def test_a_name_never_seen_is_made_of_pieces_seen_in_training(tokenizer):
    seen = set()
    texts = [arithmetic.generate(i, split="train").question for i in range(20_000)]
    for encoding in ENCODER.encode_batch(texts):
        seen.update(encoding.ids)
    for name in (*sorted(words.TEST_NAMES), "Xqzwv"):
        assert set(tokenizer.encode(f" {name}")) <= seen, name
