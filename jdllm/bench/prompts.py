"""The prompts of a benchmark, each with the number of output tokens to ask for.

Nothing is downloaded: random text is cut from a file of the user or from bundled word
problems. Lengths are drawn as SGLang draws them, so the same seed gives the same lengths.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np

from jdllm import errors
from jdllm.tasks import arithmetic

logger = logging.getLogger(__name__)

DATASETS = ("random", "random-ids", "custom", "openai", "sharegpt")
PROBLEMS_PER_TEXT = 4
MIN_FILE_TOKENS = 2  # conversations with fewer tokens than this are left out, as in SGLang
Content = str | list[int] | list[dict[str, Any]]  # text, token ids, or chat messages


class Tokenizer(Protocol):
    """The part of `jdllm.engine.tokenizer.Tokenizer` that is used here."""

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to send; `prompt_len` is in tokens, None if only the server can know it."""

    content: Content
    output_len: int
    prompt_len: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Says which prompts to load; lengths are tokens.

    `as_ids` asks for token ids instead of text, so that lengths are exact. With `vocab_size`,
    `random-ids` needs no tokenizer.
    """

    name: str = "random"
    path: str | None = None
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 1024
    range_ratio: float = 0.0
    fixed_output_len: int | None = None
    context_len: int | None = None
    apply_chat_template: bool = False
    suffix: str = ""
    seed: int = 42
    as_ids: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not self.is_random and self.path is None:
            raise errors.ConfigError(
                f"--dataset-name {self.name} needs --dataset-path FILE (nothing is downloaded)"
            )
        if self.name == "random-ids" and self.path is not None:
            raise errors.ConfigError("--dataset-path is not used by --dataset-name random-ids")
        for flag, is_given in (
            ("--apply-chat-template", self.apply_chat_template),
            ("--prompt-suffix", self.suffix),
            ("--sharegpt-output-len", self.fixed_output_len is not None),
            ("--sharegpt-context-len", self.context_len is not None),
        ):
            if self.is_random and is_given:
                raise errors.ConfigError(f"{flag} is for prompts of a file, not for {self.name}")

    @property
    def is_random(self) -> bool:
        return self.name.startswith("random")

    def load(self, tokenizer: Callable[[], Tokenizer]) -> list[Prompt]:
        """Returns the prompts; `tokenizer` is called only if one is needed."""
        if self.is_random:
            return self._random(tokenizer)
        found = list(itertools.islice(self._from_file(tokenizer), self.num_prompts))
        if not found:
            raise errors.ConfigError(f"{self.path} holds no prompt that fits")
        if len(found) < self.num_prompts:
            logger.warning("%s holds %d of %d prompts", self.path, len(found), self.num_prompts)
        return found

    def _random(self, tokenizer: Callable[[], Tokenizer]) -> list[Prompt]:
        rng = np.random.RandomState(self.seed)  # SGLang's generator
        input_lens = _random_lens(rng, self.input_len, self.range_ratio, self.num_prompts)
        output_lens = _random_lens(rng, self.output_len, self.range_ratio, self.num_prompts)
        if not self.as_ids:
            # The server adds the special tokens to a text.
            num_special = len(tokenizer().encode(""))
            input_lens = [max(1, n - num_special) for n in input_lens]
        if self.name == "random-ids":
            vocab_size = self.vocab_size or len(tokenizer())
            offsets = rng.randint(0, vocab_size, size=self.num_prompts).tolist()
            rows = [
                [(offset + i + j) % vocab_size for j in range(n)]
                for i, (offset, n) in enumerate(zip(offsets, input_lens, strict=True))
            ]
        else:
            texts, encode = self._texts(), tokenizer().encode
            rows = [_cut(encode(next(texts), add_special_tokens=False), n) for n in input_lens]
        return [
            Prompt(
                content=row if self.as_ids else tokenizer().decode(row, skip_special_tokens=False),
                prompt_len=len(row),
                output_len=output_len,
            )
            for row, output_len in zip(rows, output_lens, strict=True)
        ]

    def _texts(self) -> Iterator[str]:
        """Yields texts without end; no two begin alike until the source is used up."""
        if self.path is None:
            problems = arithmetic.problems("test", seed=self.seed)
            while True:
                some = itertools.islice(problems, PROBLEMS_PER_TEXT)
                yield "\n".join(f"{problem.question}\n{problem.answer}" for problem in some)
        texts = [text for place, row in self._rows() if (text := _first_text(row, place))]
        if not texts:
            raise errors.ConfigError(f"{self.path} holds no text")
        yield from itertools.cycle(texts)

    def _from_file(self, tokenizer: Callable[[], Tokenizer]) -> Iterator[Prompt]:
        for place, row in self._rows():
            turns = _conversation(row, place)
            if turns is not None and len(turns) < 2:
                continue
            content = self._content(row, turns, place, tokenizer)
            if self.fixed_output_len is not None:
                output_len = self.fixed_output_len
            elif turns is not None:
                output_len = len(tokenizer().encode(turns[1], add_special_tokens=False))
            else:
                output_len = _wanted_tokens(row, place)
            prompt_len = len(content) if _is_ids(content) else None
            if isinstance(content, str) and (turns is not None or self.context_len is not None):
                prompt_len = len(tokenizer().encode(content))
            if turns is not None:
                assert prompt_len is not None, "a turn is text or has become ids"
                if min(prompt_len, output_len) < MIN_FILE_TOKENS:
                    continue
            if self.context_len is not None:
                if prompt_len is None:
                    assert _is_messages(content), "text and ids have a length by now"
                    prompt_len = len(tokenizer().apply_chat_template(content))
                if prompt_len + output_len > self.context_len:
                    continue
            yield Prompt(content=content, prompt_len=prompt_len, output_len=output_len)

    def _content(
        self,
        row: Mapping[str, Any],
        turns: list[str] | None,
        place: str,
        tokenizer: Callable[[], Tokenizer],
    ) -> Content:
        content = turns[0] if turns is not None else _row_content(row, place)
        if self.suffix:
            if not isinstance(content, str):
                raise errors.ConfigError(f"--prompt-suffix needs text, which {place} does not hold")
            content += self.suffix
        if isinstance(content, str) and self.apply_chat_template:
            return tokenizer().apply_chat_template([{"role": "user", "content": content}])
        if isinstance(content, str) and self.as_ids:
            return tokenizer().encode(content)
        if _is_messages(content) and (self.as_ids or self.apply_chat_template):
            return tokenizer().apply_chat_template(content)
        return content

    def _rows(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns (place, for errors; row) of a file: a JSON array, or one JSON object per line."""
        assert self.path is not None, "__post_init__ asks for one where rows are read"
        try:
            text = pathlib.Path(self.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise errors.ConfigError(f"cannot read --dataset-path {self.path}: {error}") from error
        if text.lstrip().startswith("["):
            rows = _parsed(text, self.path)
        else:
            lines = enumerate(text.splitlines(), start=1)
            rows = [_parsed(line, f"{self.path}:{n}") for n, line in lines if line.strip()]
        placed = [(f"row {number} of {self.path}", row) for number, row in enumerate(rows, start=1)]
        for place, row in placed:
            if not isinstance(row, dict):
                raise errors.ConfigError(f"{place} is not a JSON object")
        if self.name in ("custom", "sharegpt"):
            random.Random(self.seed).shuffle(placed)
        return placed


def _random_lens(
    rng: np.random.RandomState, full_len: int, range_ratio: float, count: int
) -> list[int]:
    low = max(int(full_len * range_ratio), 1)
    return rng.randint(low, full_len + 1, size=count).tolist()


def _cut(ids: list[int], length: int) -> list[int]:
    """Returns `ids` cut or repeated to `length`."""
    return list(itertools.islice(itertools.cycle(ids), length))


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise errors.ConfigError(f"{place} is not valid JSON: {error}") from error


def _conversation(row: Mapping[str, Any], place: str) -> list[str] | None:
    """Returns the turns of a row in ShareGPT's form, None for a row in another form."""
    turns = row.get("conversations", row.get("conversation"))
    if turns is None:
        return None
    values = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)]
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise errors.ConfigError(f"{place}: a turn needs text in content or value")
    return texts


def _row_content(row: Mapping[str, Any], place: str) -> Content:
    for name in ("messages", "prompt", "text", "question", "input_ids"):
        if name in row:
            content = row[name]
            is_messages = isinstance(content, list) and all(isinstance(m, dict) for m in content)
            if content and (isinstance(content, str) or is_messages or _is_ids(content)):
                return content
            raise errors.ConfigError(f"{place}: {name} must be text, token ids or chat messages")
    raise errors.ConfigError(
        f"{place} has none of conversations, messages, prompt, text, question, input_ids"
    )


def _first_text(row: Mapping[str, Any], place: str) -> str | None:
    turns = _conversation(row, place)
    if turns is not None:
        return turns[0] if turns else None
    content = _row_content(row, place)
    return content if isinstance(content, str) else None


def _wanted_tokens(row: Mapping[str, Any], place: str) -> int:
    names = ("output_len", "max_new_tokens", "max_tokens", "max_completion_tokens")
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None:
        raise errors.ConfigError(
            f"{place} has none of {', '.join(names)}; give --sharegpt-output-len N for all rows"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise errors.ConfigError(f"{place}: {value!r} is not a positive number of tokens")
    return value


def _is_ids(content: Any) -> TypeGuard[list[int]]:
    return isinstance(content, list) and bool(content) and all(type(x) is int for x in content)


def _is_messages(content: Content) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(content, list) and not _is_ids(content)
