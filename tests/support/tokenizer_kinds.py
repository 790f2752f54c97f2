"""Small tokenizers of all kinds, each with the control tokens of the templates in tests."""

from __future__ import annotations

import json
import pathlib

import tokenizers
from support import chat_templates
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTROL = (
    "<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<start_of_turn>",
    "<end_of_turn>", "|<MASK>|", "[RESULT", "[/RESULT]", "[CALL",
)  # fmt: skip
# Control tokens that only the templates make special, and one that they do not mention.
WRITTEN, UNUSED = ("<think>", "<tool_call>", "</tool_response>"), "<unused>"
CORPUS = [
    *["the cat sat on the mat, 123 times; don't! l'été 北京\n\n  x < 1"] * 20,
    *["user assistant system tool Be brief. im_start im_end <|im_end|> <s>"] * 20,
]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(**options) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def lower_case() -> tokenizers.Tokenizer:
    """Its control tokens are found in the normal form of a text."""
    made = byte_level()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made


def leaking() -> tokenizers.Tokenizer:
    """Its model itself makes `<s>` and `<|im_end|>` of their text: merges, and no splits."""
    made = byte_level(use_regex=False)
    state = json.loads(made.to_str())
    for text in ("<s>", "<|im_end|>"):
        for end in range(2, len(text) + 1):
            if text[:end] not in state["model"]["vocab"]:
                state["model"]["vocab"][text[:end]] = len(state["model"]["vocab"])
            state["model"]["merges"].insert(0, [text[: end - 1], text[end - 1]])
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def pieces() -> tokenizers.Tokenizer:
    """As SentencePiece: a blank before the first piece, `<s>` in the vocabulary."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    letters = sorted({*"".join(CORPUS), *map(chr, range(33, 127))} - {" "})
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "<s>"], unk_token="<unk>",
            initial_alphabet=letters, show_progress=False,
        ),
    )  # fmt: skip
    return made


def words() -> tokenizers.Tokenizer:
    """Whole words; what it does not know is `<unk>`."""
    found = sorted({word for line in CORPUS for word in line.split()} | {"<s>", "|<MASK>|"})
    vocabulary = {"<unk>": 0} | {word: i + 1 for i, word in enumerate(found)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def blanks_replaced() -> tokenizers.Tokenizer:
    """As Gemma: the control tokens are in the model's own vocabulary, and so are runs of lines."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Replace(SPACE, " ")
    letters = sorted({*"".join(CORPUS), *map(chr, range(33, 127)), "\n"})
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", *CONTROL], initial_alphabet=letters,
            show_progress=False,
        ),
    )  # fmt: skip
    made.add_tokens(["\n\n", "\n\n\n"])
    return made


KINDS = {
    "byte-level": byte_level,
    "lower-case": lower_case,
    "leaking": leaking,
    "pieces": pieces,
    "words": words,
    "blanks-replaced": blanks_replaced,
}


def write(directory: pathlib.Path, kind: str, template: str) -> pathlib.Path:
    """Writes a tokenizer that begins texts with `<s>`, and its chat template."""
    made = KINDS[kind]()
    form = {"normalized": kind == "lower-case"}
    made.add_special_tokens([tokenizers.AddedToken(text, **form) for text in CONTROL])
    made.add_tokens([tokenizers.AddedToken(text, **form) for text in (*WRITTEN, UNUSED)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    made.save(str(directory / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if kind in ("pieces", "words", "blanks-replaced"):
        options["unk_token"] = "<unk>"
    options |= {"mask_token": "|<MASK>|", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    (directory / "chat_template.jinja").write_text(template)
    return directory


TEMPLATES = chat_templates.ALL | {
    # Texts of two messages meet, and a name is all that a tag of the template lacks.
    "joining": "{% for m in messages %}{{ m.content }}{% endfor %}<|eot|>",
    "tags": "{% for m in messages %}<{{ m.name if m.name is defined else 'x' }}>{{ m.content }}"
    "<|eot|>{% endfor %}",
}
