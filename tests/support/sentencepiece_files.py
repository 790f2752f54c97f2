"""A tokenizer as Llama's SentencePiece vocabularies have it: blocks for spaces, tokens for bytes.

A space at the beginning of a text is dropped, and each byte that is no character is written as one
replacement character.
"""

from __future__ import annotations

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers

SPECIALS = ("<s>", "</s>", "<mask>")
BLOCK = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = ("", "a", "b", "ab", "##", "#", "1", "12", "\u00e9", "\u4e2d", "\u00e9\u4e2d")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(directory: pathlib.Path) -> None:
    """Writes the files of the tokenizer."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPECIALS]
    pieces += [piece for word in WORDS for piece in (BLOCK + word, word) if piece]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLOCK), normalizers.Replace(" ", BLOCK)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(BLOCK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(list(SPECIALS))
    made.save(str(directory / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "mask_token": "<mask>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
