"""Builds the tokenizer of jdllm-nano: byte-level BPE over the generator's training text.

Every byte is a token. Every digit is one token, so that arithmetic is about digits and not about
merges. The script reads training text only: a merge that training never shows would be an
embedding that was never learnt.

    python scripts/build_nano_tokenizer.py --output-dir jdllm/assets/jdllm-nano
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jdllm.tasks import arithmetic

SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|mask|>",
    "<role>",
    "</role>",
    "<|role_end|>",
)


def main() -> None:
    """Trains the tokenizer and writes its three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=pathlib.Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=1536)
    parser.add_argument("--num-problems", type=int, default=60_000)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = build(args.vocab_size, args.num_problems)
    tokenizer.save(str(args.output_dir / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", tokenizer_config()),
        ("special_tokens_map.json", special_tokens_map()),
    ):
        (args.output_dir / name).write_text(json.dumps(content, indent=2) + "\n")


def build(vocab_size: int, num_problems: int) -> tokenizers.Tokenizer:
    """Returns the trained tokenizer; the special tokens have ids 0 to 5."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_problems), trainer)
    return tokenizer


def _texts(num_problems: int) -> Iterator[str]:
    for problem in itertools.islice(arithmetic.problems("train"), num_problems):
        yield problem.question
        yield problem.answer
        yield "HUMAN"
        yield "ASSISTANT"
        yield "SYSTEM"


def special_tokens_map() -> dict[str, str]:
    return {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens_map(),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


if __name__ == "__main__":
    main()
