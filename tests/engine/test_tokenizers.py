"""Tokenizers of the families: code that a checkpoint brings is never run, its data is honoured."""

import json
import shutil
import types

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine import tokenizer
from jdllm.engine.start import build
from jdllm.models import registry

CORPUS = ["the cat sat on the mat, 123 times; he said: don't! l'été Straße 北京\n\n  x = 1"] * 20
TEXTS = [
    "the cat sat on the mat",
    "he said: don't! 2026\n\n  y = 42\t",
    "l'été 北京 \N{PILE OF POO} a\r\nb",
    " leading and trailing ",
]
DREAM_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|beginoftext|>", "<|mask|>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|startoftext|>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def trained():
    """Returns a small byte-level BPE, the same at every call."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet)
    )
    return model


def added_tokens(first_id, contents):
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        str(first_id + i): {"content": text, "special": text.startswith("<|"), **flags}
        for i, text in enumerate(contents)
    }


def write_json(path, content):
    path.write_text(json.dumps(content))


def dream_files(directory, **changes):
    """Writes a tokenizer as Dream's checkpoints hold it, with code that tells when it runs."""
    vocabulary = trained()
    vocabulary.model.save(str(directory))
    first_id = vocabulary.get_vocab_size()
    options = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens(first_id, DREAM_SPECIALS),
        "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "mask_token": "<|mask|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    write_json(directory / "tokenizer_config.json", options | changes)
    maps = {"AutoConfig": "configuration_dream.DreamConfig"}
    architecture = {"model_type": "Dream", "architectures": ["DreamModel"], "auto_map": maps}
    write_json(directory / "config.json", architecture)
    for name in ("tokenization_dream", "configuration_dream"):
        code = f"open({str(directory / 'ran')!r}, 'w')\nraise RuntimeError('remote code ran')\n"
        (directory / f"{name}.py").write_text(code)
    return first_id


def llada_files(directory):
    """Writes a tokenizer as LLaDA's checkpoints hold it: tokenizer.json alone decides."""
    vocabulary = trained()
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    names = ("<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>")
    vocabulary.add_special_tokens(list(names))
    vocabulary.save(str(directory / "tokenizer.json"))
    options = {
        "bos_token": "<|startoftext|>",
        "chat_template": LLAMA3,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(directory / "tokenizer_config.json", options)
    maps = {"AutoConfig": "configuration_llada.LLaDAConfig"}
    write_json(directory / "config.json", {"model_type": "llada", "auto_map": maps})


def merged(text, merges):
    """Returns the pieces of one pre-token by the definition of BPE: the earliest merge first."""
    characters = transformers.convert_slow_tokenizer.bytes_to_unicode()
    pieces = [characters[byte] for byte in text.encode()]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    while True:
        pairs = [
            (ranks[pair], i) for i, pair in enumerate(zip(pieces, pieces[1:])) if pair in ranks
        ]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = ["".join(pieces[i : i + 2])]


def test_dream_loads_without_running_its_code(tmp_path):
    first_id = dream_files(tmp_path)
    loaded = tokenizer.Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert len(loaded) == first_id + len(DREAM_SPECIALS)
    assert loaded.eos_token_id == first_id
    for i, text in enumerate(DREAM_SPECIALS):
        assert loaded.token_id(text) == first_id + i
        assert loaded.encode(text) == [first_id + i]
    hidden = f"a{DREAM_SPECIALS[-1]}b{DREAM_SPECIALS[2]}"
    assert loaded.decode(loaded.encode(hidden)) == "ab"
    assert loaded.decode(loaded.encode(hidden), skip_special_tokens=False) == hidden


@pytest.mark.parametrize("text", TEXTS)
def test_dream_texts_round_trip(text, tmp_path):
    dream_files(tmp_path)
    loaded = tokenizer.Tokenizer(tmp_path)
    assert loaded.decode(loaded.encode(text)) == text


def test_dream_ids_are_those_of_the_files(tmp_path):
    dream_files(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    lines = (tmp_path / "merges.txt").read_text().splitlines()
    merges = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    # Split by hand as Qwen2 does: a blank goes with the word behind it, digits stand alone.
    split = ["the", " cat", " sat", " on", " the", " mat", ",", " ", "1", "2", "3", " times"]
    wanted = [vocabulary[piece] for part in split for piece in merged(part, merges)]
    assert len(wanted) < len("".join(split))
    assert tokenizer.Tokenizer(tmp_path).encode("".join(split)) == wanted


def test_dream_chat_template(tmp_path):
    first_id = dream_files(tmp_path)
    loaded = tokenizer.Tokenizer(tmp_path)
    ids = loaded.apply_chat_template([{"role": "user", "content": "the cat"}])
    shown = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.decode(ids, skip_special_tokens=False) == shown
    assert [i for i in ids if i >= first_id] == [first_id + 1, first_id + 2, first_id + 1]


@pytest.mark.parametrize("adds", [False, True])
def test_dream_begins_texts_as_its_config_says(adds, tmp_path):
    first_id = dream_files(tmp_path, add_bos_token=adds)
    ids = tokenizer.Tokenizer(tmp_path).encode("the")
    assert (ids[0] == first_id + DREAM_SPECIALS.index("<|beginoftext|>")) is adds


def test_dream_with_a_tokenizer_json_alone(tmp_path):
    dream_files(tmp_path)
    before = tokenizer.Tokenizer(tmp_path)
    before._hf.save_pretrained(tmp_path / "saved")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    shutil.copy(tmp_path / "saved" / "tokenizer.json", tmp_path)
    after = tokenizer.Tokenizer(tmp_path)
    assert [after.encode(text) for text in TEXTS] == [before.encode(text) for text in TEXTS]


def test_a_token_that_gets_another_id_is_refused(tmp_path):
    first_id = dream_files(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    options = json.loads(path.read_text())
    tokens = options["added_tokens_decoder"]
    tokens[str(first_id + 100)] = tokens.pop(str(first_id + 5))
    write_json(path, options)
    with pytest.raises(errors.ConfigError, match=rf"<\|mask\|>.*{first_id + 100}"):
        tokenizer.Tokenizer(tmp_path)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_vocabulary_that_is_not_whole_is_refused(missing, tmp_path):
    dream_files(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(errors.ConfigError, match="no usable tokenizer"):
        tokenizer.Tokenizer(tmp_path)


def test_any_other_class_of_its_own_is_refused_and_not_run(tmp_path):
    dream_files(tmp_path, tokenizer_class="OtherTokenizer")
    with pytest.raises(errors.ConfigError, match="custom code"):
        tokenizer.Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_llada_chat_template(tmp_path):
    llada_files(tmp_path)
    loaded = tokenizer.Tokenizer(tmp_path)
    ids = loaded.apply_chat_template([{"role": "user", "content": "the cat"}])
    assert loaded.decode(ids, skip_special_tokens=False) == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nthe cat<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def end_tokens(architecture, directory, eos_token_ids=(7,)):
    diffusion = types.SimpleNamespace(eos_token_ids=eos_token_ids)
    spec = types.SimpleNamespace(architecture=architecture, diffusion=diffusion)
    loaded = tokenizer.Tokenizer(directory)
    ids = build._eos_token_ids(spec, loaded)
    return [loaded._hf.convert_ids_to_tokens(i) for i in ids if i not in eos_token_ids]


def test_every_family_ends_its_turns():
    # Templates of Stable-DiffCoder and Mistral's tokenizers end a turn with the end of the text.
    without = {name for name, family in registry.FAMILIES.items() if not family.end_of_turn}
    assert without == {"StableDiffcoderForCausalLM", "NemotronLabsDiffusionModel"}


def sdar_files(directory):
    """Writes a tokenizer as SDAR's checkpoints hold it: Qwen2's class, code only for the model."""
    first_id = dream_files(directory)
    options = json.loads((directory / "tokenizer_config.json").read_text())
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
    options |= {
        "added_tokens_decoder": added_tokens(first_id, specials),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|MASK|>"],
        "bos_token": None,
        "mask_token": "<|MASK|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    del options["auto_map"]
    write_json(directory / "tokenizer_config.json", options)
    code = {"AutoConfig": "configuration_sdar.SDARConfig"}
    write_json(directory / "config.json", {"model_type": "sdar", "auto_map": code})
    shutil.copy(directory / "configuration_dream.py", directory / "configuration_sdar.py")
    return first_id


def test_sdar_has_qwen2_s_tokenizer_and_its_code_is_not_run(tmp_path):
    first_id = sdar_files(tmp_path)
    loaded = tokenizer.Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert (loaded.token_id("<|MASK|>"), loaded.eos_token_id) == (first_id + 3, first_id)
    ids = loaded.apply_chat_template([{"role": "user", "content": "the cat"}])
    shown = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.decode(ids, skip_special_tokens=False) == shown
    for architecture in ("SDARForCausalLM", "SDARMoeForCausalLM"):
        assert end_tokens(architecture, tmp_path) == ["<|endoftext|>", "<|im_end|>"]


def test_fast_dllm_v2_has_qwen2_s_tokenizer_with_a_mask_of_its_own(tmp_path):
    first_id = sdar_files(tmp_path)
    options = json.loads((tmp_path / "tokenizer_config.json").read_text())
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "|<MASK>|")
    options |= {
        "added_tokens_decoder": added_tokens(first_id, specials),
        "additional_special_tokens": list(specials[1:]),
        "mask_token": "|<MASK>|",
        "eos_token": "<|im_end|>",
    }
    write_json(tmp_path / "tokenizer_config.json", options)
    loaded = tokenizer.Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert loaded.token_id("|<MASK>|") == first_id + 3
    ids = loaded.apply_chat_template([{"role": "user", "content": "the cat"}])
    shown = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.decode(ids, skip_special_tokens=False) == shown
    assert end_tokens("Fast_dLLM_QwenForCausalLM", tmp_path) == ["<|im_end|>"]


def test_end_tokens_are_those_of_the_family(tmp_path):
    dream, llada = tmp_path / "dream", tmp_path / "llada"
    for directory, write in ((dream, dream_files), (llada, llada_files)):
        directory.mkdir()
        write(directory)
    assert end_tokens("DreamModel", dream) == ["<|endoftext|>", "<|im_end|>"]
    assert end_tokens("LLaDAModelLM", llada) == ["<|endoftext|>", "<|eot_id|>"]
    # What ends another family's turns may be in the vocabulary: here it is but a token.
    assert end_tokens("LLaDAModelLM", dream) == ["<|endoftext|>"]
    bundled = end_tokens("LLaDA2MoeModelLM", source.bundled_model(), eos_token_ids=(1,))
    assert bundled == ["<|role_end|>"]


def test_diffusion_gemma_has_gemma_s_tokenizer_and_a_template_in_a_file_of_its_own(tmp_path):
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    vocabulary = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    vocabulary.normalizer = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    vocabulary.decoder = decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    vocabulary.train_from_iterator(
        [*CORPUS, "user model"], trainers.BpeTrainer(vocab_size=200, special_tokens=specials)
    )
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        },
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    )
    architecture = "DiffusionGemmaForBlockDiffusion"
    write_json(
        tmp_path / "config.json",
        {"model_type": "diffusion_gemma", "architectures": [architecture]},
    )
    loaded = tokenizer.Tokenizer(tmp_path)
    ids = loaded.apply_chat_template([{"role": "user", "content": "the cat"}])
    shown = "<bos><|turn>user\nthe cat<turn|>\n<|turn>model\n"
    assert loaded.decode(ids, skip_special_tokens=False) == shown
    assert ids.count(loaded.token_id("<bos>")) == 1
    assert end_tokens(architecture, tmp_path) == ["<eos>", "<turn|>"]
