"""The tokenizer of a pipeline for scenes: byte-level BPE of their captions, and Qwen3's template.

Case and spaces do not matter, so a word is one token wherever it stands. A word that no caption
has falls into pieces, at worst into bytes.
"""

from __future__ import annotations

import itertools
import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jdllm.checkpoint import tokenizer_checks
from jdllm.tasks.scenes import generator

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CAPTIONS = 4_000
# What Qwen3's own template makes of conversations without tools, system prompt and thinking.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write(folder: pathlib.Path, *, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json with ids below `vocab_size`."""
    folder.mkdir(parents=True, exist_ok=True)
    _trained(vocab_size).save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(options, indent=2) + "\n"
    (folder / tokenizer_checks.CONFIG_NAME).write_text(text, encoding="utf-8")


def _trained(vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    scenes = itertools.islice(generator.scenes("train"), _CAPTIONS)
    # The words of the template, too.
    texts = itertools.chain(["user assistant"] * 50, (scene.caption for scene in scenes))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
