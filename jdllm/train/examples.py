"""Training batches: generated problems, tokenised as in the chat endpoint.

Batch `step` is a pure function of (seed, step), so a resumed run goes on where it stopped, without
any saved iterator state.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import grain
import numpy as np
import tokenizers
from absl import flags
from jaxtyping import Int32

from jdllm import errors
from jdllm.checkpoint import tokenizer_checks
from jdllm.tasks import arithmetic
from jdllm.tasks.word_problems import rewording
from jdllm.templates import chat
from jdllm.train.config import TrainConfig

Batch = dict[str, Int32[np.ndarray, "B ..."]]  # see `pad_rows`
TURN_END = "<|role_end|>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of the rows of a batch."""

    sequence_length: int
    block_size: int
    answer_blocks: int

    def __post_init__(self) -> None:
        if self.sequence_length % self.block_size:
            raise errors.ConfigError(
                f"sequence_length={self.sequence_length} must be a multiple of "
                f"block_size={self.block_size}"
            )

    def fits(self, prompt_len: int, total_len: int) -> bool:
        """Returns whether a row of these lengths fits into the batch."""
        last = (total_len - 1) // self.block_size
        blocks = last - prompt_len // self.block_size + 1
        return total_len <= self.sequence_length and blocks <= self.answer_blocks


class ChatFormat:
    """Turns problems into token ids with a model folder's own tokenizer and chat template."""

    def __init__(self, model_path: pathlib.Path):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
        template = (model_path / tokenizer_checks.TEMPLATE_NAME).read_text(encoding="utf-8")
        self._before, self._after = _around_question(
            chat.ChatTemplate(template, special_tokens=_special_tokens(model_path))
        )
        hf = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        self.pad_id: int = hf["pad_token_id"]
        turn_end_id = self.tokenizer.token_to_id(TURN_END)
        if turn_end_id is None:
            raise errors.ConfigError(
                f"{model_path}/tokenizer.json has no {TURN_END}, with which training ends an answer"
            )
        self.turn_end_id: int = turn_end_id

    def prompts(self, questions: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each question as a chat of one turn, up to where the answer begins."""
        return self._encode([self._before + question + self._after for question in questions])

    def answers(self, answers: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each answer and of the end of the turn."""
        return [[*ids, self.turn_end_id] for ids in self._encode(answers)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


def _special_tokens(model_path: pathlib.Path) -> dict[str, str]:
    """Returns what `bos_token` and alike are in templates, as transformers reads them."""
    path = model_path / tokenizer_checks.CONFIG_NAME
    options = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokens = {name: value for name, value in options.items() if name.endswith("_token") and value}
    return {
        name: tokenizer_checks.text_of(value)
        for name, value in tokens.items()
        if isinstance(value, str | dict)
    }


def _around_question(template: chat.ChatTemplate) -> tuple[str, str]:
    """Returns what a template writes before and after the question of a conversation's user."""
    try:
        rendered = template.render([{"role": "user", "content": "\0"}])
    except errors.RequestError as error:
        raise errors.ConfigError(str(error)) from error
    parts = rendered.split("\0")
    if len(parts) != 2:
        raise errors.ConfigError("the chat template must write the user's question once")
    return parts[0], parts[1]


def variety(config: TrainConfig) -> arithmetic.Variety:
    """Returns what the questions of a run look like."""
    return arithmetic.Variety(
        written_share=config.written_share,
        changes=rewording.Changes(
            reworded=config.reworded,
            noise=config.question_noise,
            strange_words=config.strange_words,
        ),
    )


class ProblemBatches(grain.sources.RandomAccessDataSource):
    """Element `step` is the whole batch of that step, tokenised and padded."""

    def __init__(
        self,
        chat: ChatFormat,
        layout: Layout,
        *,
        batch_size: int,
        seed: int,
        length: int,
        variety: arithmetic.Variety | None = None,
    ):
        self.chat, self.layout, self.variety = chat, layout, variety
        self.batch_size, self.seed, self.length = batch_size, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, step: int) -> Batch:
        rows: list[tuple[list[int], list[int]]] = []
        # Spare problems replace problems that are too long; in practice these are enough.
        stride = self.batch_size + self.batch_size // 8 + 2
        problems = [
            arithmetic.generate(
                int(step) * stride + i, split="train", seed=self.seed, variety=self.variety
            )
            for i in range(stride)
        ]
        prompts = self.chat.prompts([p.question for p in problems])
        answers = self.chat.answers([p.answer for p in problems])
        rows = [
            row
            for row in zip(prompts, answers, strict=True)
            if self.layout.fits(len(row[0]), len(row[0]) + len(row[1]))
        ]
        if len(rows) < self.batch_size:
            raise errors.ConfigError(
                f"only {len(rows)} of {stride} problems fit {self.layout}; raise sequence_length"
            )
        return pad_rows(rows[: self.batch_size], self.layout, self.chat.pad_id)


def pad_rows(rows: Sequence[tuple[list[int], list[int]]], layout: Layout, pad_id: int) -> Batch:
    """Returns `tokens` [B, S], and `prompt_lens`, `answer_ends` and `total_lens` [B].

    After an answer, a row holds `pad_id` (the end-of-text token), so the model learns to fill the
    rest of a block with it. `total_lens` are whole blocks.
    """
    tokens = np.full((len(rows), layout.sequence_length), pad_id, np.int32)
    prompt_lens = np.zeros(len(rows), np.int32)
    answer_ends = np.zeros(len(rows), np.int32)
    total_lens = np.zeros(len(rows), np.int32)
    for i, (prompt, answer) in enumerate(rows):
        ids = prompt + answer
        tokens[i, : len(ids)] = ids
        prompt_lens[i] = len(prompt)
        answer_ends[i] = len(ids)
        total_lens[i] = -(-len(ids) // layout.block_size) * layout.block_size
    return {
        "tokens": tokens,
        "prompt_lens": prompt_lens,
        "answer_ends": answer_ends,
        "total_lens": total_lens,
    }


def batches(
    source: ProblemBatches, *, start_step: int, num_threads: int, num_workers: int, prefetch: int
) -> grain.DatasetIterator[Batch]:
    """Returns the batches of `start_step`, `start_step + 1`, ..., and prepares some in advance.

    `num_workers` processes make them (for an accelerator that takes ten batches a second), or
    threads of this process if it is 0. The batches and their order are the same.
    """
    dataset = grain.MapDataset.source(source)[start_step:]
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
    ahead = dataset.to_iter_dataset(options)
    if num_workers:
        # grain's workers read absl flags, but only absl's own main parses them.
        flags.FLAGS.mark_as_parsed()
        ahead = ahead.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=prefetch)
        )
    return iter(ahead)


def heldout(chat: ChatFormat, layout: Layout, count: int) -> tuple[list[arithmetic.Problem], Batch]:
    """Returns the first `count` test problems that fit, and their batch."""
    problems, rows = [], []
    for problem in arithmetic.problems("test"):
        prompt, answer = chat.prompts([problem.question])[0], chat.answers([problem.answer])[0]
        if layout.fits(len(prompt), len(prompt) + len(answer)):
            problems.append(problem)
            rows.append((prompt, answer))
        if len(rows) == count:
            break
    return problems, pad_rows(rows, layout, chat.pad_id)
