"""vLLM's offline interface where it needs no trained model: conversations, tokenizer, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
import transformers
from support import hash_engine, hash_model
from tokenizers import decoders, models, pre_tokenizers

from jdllm import errors
from jdllm.engine import tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if not loop.last or add_generation_prompt %}"
    "b{% endif %}{% endfor %}{% if add_generation_prompt %}c{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "d"}, {"role": "assistant", "content": "ad"}
LIMIT = {"max_new_tokens": 2}
HALF = "a\ud800"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """One token per letter from a to z, as `hash_engine.LetterTokenizer` has them."""
    folder = tmp_path_factory.mktemp("letters")
    letters = {chr(ord("a") + i): i for i in range(hash_model.VOCAB)}
    model = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="a"))
    model.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)
    made = hash_engine.make_llm(tokenizer.Tokenizer(folder))
    yield made
    made.shutdown()


def prompts_of(llm, *arguments, **options):
    replies = llm.chat(*arguments, LIMIT, use_tqdm=False, **options)
    return [llm.get_tokenizer().decode(one.prompt_token_ids) for one in replies]


def test_a_conversation_ends_as_it_is_asked_to(llm):
    conversation = [USER, ASSISTANT]
    assert prompts_of(llm, conversation) == ["dbadbc"]
    assert prompts_of(llm, conversation, add_generation_prompt=False) == ["dbad"]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompts_of(llm, [conversation, [USER]], **goes_on) == ["dbad", "d"]
    with pytest.raises(errors.RequestError, match="exclude"):
        prompts_of(llm, conversation, continue_final_message=True)


def test_the_tokenizer_is_that_of_transformers_with_our_template(llm):
    hf = llm.get_tokenizer()
    assert isinstance(hf, transformers.PreTrainedTokenizerBase)
    assert hf.decode(hf.encode("abc")) == "abc"
    text = hf.apply_chat_template([USER, ASSISTANT], tokenize=False, add_generation_prompt=True)
    assert [text] == prompts_of(llm, [USER, ASSISTANT])
    ids = llm.engine.tokenizer.apply_chat_template([USER])
    assert hf.apply_chat_template([USER], add_generation_prompt=True)["input_ids"] == ids


def test_ids_may_be_whole_floats(llm):
    for ids in ([1.0, 2.0], [1, 2.0], np.array([1.0, 2.0])):
        (found,) = llm.generate({"prompt_token_ids": ids}, LIMIT, use_tqdm=False)
        assert found.prompt_token_ids == [1, 2]
    assert list(llm.engine.iterate([1.0, 2.0], LIMIT))
    for wrong in ([1.5], [1, float("nan")], [True], ["a"]):
        with pytest.raises(errors.RequestError):
            llm.generate({"prompt_token_ids": wrong}, LIMIT, use_tqdm=False)


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (lambda llm: llm.generate(["ab", HALF, "c"], LIMIT, use_tqdm=False), "prompt"),
        (lambda llm: llm.generate({"prompt": HALF}, LIMIT, use_tqdm=False), "prompt"),
        (lambda llm: llm.engine.generate(["ab", HALF], LIMIT), "prompt"),
        (lambda llm: llm.engine.iterate(["ab", HALF], LIMIT), "prompt"),
        (lambda llm: llm.engine.encode(HALF), "prompt"),
        (lambda llm: llm.engine.trace(HALF, LIMIT), "prompt"),
        (lambda llm: llm.engine.generate("ab", LIMIT, suffix=HALF), "suffix"),
        (lambda llm: llm.engine.generate("ab", LIMIT, given={1: HALF}), "given"),
        (lambda llm: llm.engine.generate("ab", LIMIT | {"stop": [HALF]}), "stop"),
        (
            lambda llm: llm.chat([[USER], [USER, USER | {"content": HALF}]], LIMIT),
            "messages.1.content",
        ),
        (lambda llm: llm.chat([USER | {"name": HALF}], LIMIT), "messages"),
    ],
)
def test_half_a_character_is_named_and_nothing_has_run(llm, ask, param):
    before = llm.engine._built.runner.num_launches, hash_engine.num_requests(llm.engine)
    with pytest.raises(errors.RequestError, match="lone surrogate") as raised:
        ask(llm)
    assert raised.value.param == param
    now = llm.engine._built.runner.num_launches, hash_engine.num_requests(llm.engine)
    assert now == before
    (fine,) = llm.generate("ab", LIMIT, use_tqdm=False)
    assert fine.outputs[0].token_ids
