"""The training run as one frozen dataclass, read from YAML; unknown keys are errors.

`recipes.load` reads the config of whatever recipe a file names.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jdllm import errors
from jdllm.options.config import parse_yaml, read_yaml
from jdllm.train import optimizers

_OF_ANY_RUN = (
    "warmup_steps",
    "num_steps",
    "batch_size",
    "log_every",
    "checkpoint_every",
    "eval_every",
    "eval_problems",
)
_AT_LEAST_ONE = (
    "sequence_length",
    "answer_blocks",
    "noise_copies",
    "data_threads",
    "prefetch_batches",
)
_SHARES = (
    "written_share",
    "reworded",
    "question_noise",
    "strange_words",
    "question_noise_words",
    "dropout",
)


MAX_DROPOUT = 0.9

Kind = TypeVar("Kind", bound="RunConfig")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The options of a run of any recipe; what else a recipe needs, its own config adds."""

    recipe: str = "text"
    seed: int = 0
    num_steps: int = 10_000
    max_minutes: float | None = None  # stop (checkpoint, evaluate, export) after this much time
    batch_size: int = 512  # problems per step
    attention: str = "auto"  # of steps: cuDNN where it can, else XLA; or "xla", "cudnn"
    optimizer: str = "adamw"  # or "muon": of the blocks' matrices; AdamW for all other weights
    learning_rate: float = 1.5e-3
    warmup_steps: int = 300
    decay_share: float = 0.3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    compute_dtype: str = "bfloat16"
    log_every: int = 50
    checkpoint_every: int = 1_000
    eval_every: int = 1_000
    eval_problems: int = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunConfig):
    """All options of a run of the text recipe, except where it writes.

    `model_path` (a directory, or a bundled model's name) holds config.json, tokenizer and chat
    template. The learning rate warms up, stays at `learning_rate`, and falls linearly to 0 over
    the last `decay_share` of the run, whether `num_steps` or `max_minutes` end it.
    """

    model_path: str
    sequence_length: int = 192  # tokens of prompt and answer, a multiple of the block size
    answer_blocks: int = 4  # most blocks that an answer may touch; block 0 begins at position 0
    noise_copies: int = 1  # independently masked copies of every answer; 1 for full attention
    noise_blocks: int = 0  # of these, how many a step masks, drawn anew; 0: all
    full_mask_fraction: float = 0.2  # share of blocks, or canvases, that are masked entirely
    written_share: float = 0.75  # of the problems, those that were written as a whole
    reworded: float = 0.0  # share of the questions that are said in other words
    question_noise: float = 0.0  # share of the questions with mistakes of typing
    strange_words: float = 0.0  # share of the questions with words that nobody knows
    question_noise_words: float = 0.0  # share of question tokens that are masked or replaced
    question_loss: float = 0.0  # weight of guessing these tokens
    dropout: float = 0.0  # share of the activations of embeddings and residual branches
    adam_b2: float = 0.98
    balance_rate: float = 1e-3  # step of the expert biases toward equal load
    eval_thresholds: tuple[float, ...] = (0.9,)  # beside one token per step
    data_threads: int = 4  # threads in each process that makes batches
    data_workers: int = 0  # processes that make batches; 0: only the main process
    prefetch_batches: int = 8

    def __post_init__(self) -> None:
        check(self, at_least_one=_AT_LEAST_ONE)
        if self.data_workers < 0:
            raise errors.ConfigError(f"data_workers={self.data_workers} must be at least 0")
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise errors.ConfigError(f"{name}={getattr(self, name)} must be from 0 to 1")
        if self.dropout > MAX_DROPOUT:
            raise errors.ConfigError(f"dropout={self.dropout} must be at most {MAX_DROPOUT}")
        if not 0 <= self.noise_blocks <= self.answer_blocks:
            raise errors.ConfigError(
                f"noise_blocks={self.noise_blocks} must be from 0 to "
                f"answer_blocks={self.answer_blocks}"
            )
        if self.question_loss < 0 or (self.question_loss and not self.question_noise_words):
            raise errors.ConfigError(
                f"question_loss={self.question_loss} must be at least 0, and needs "
                "question_noise_words"
            )


def check(config: RunConfig, *, at_least_one: Sequence[str]) -> None:
    """Raises for an option of any run that cannot be, or one of the named ones below 1."""
    if config.compute_dtype not in ("bfloat16", "float32"):
        raise errors.ConfigError(
            f"compute_dtype={config.compute_dtype!r} must be 'bfloat16' or 'float32'"
        )
    if not 0 < config.decay_share <= 1:
        raise errors.ConfigError(f"decay_share={config.decay_share} must be above 0 and at most 1")
    if config.attention not in ("auto", "xla", "cudnn"):
        raise errors.ConfigError(f"attention={config.attention!r} must be 'auto', 'xla' or 'cudnn'")
    if config.optimizer not in optimizers.NAMES:
        raise errors.ConfigError(
            f"optimizer={config.optimizer!r} must be one of {optimizers.NAMES}"
        )
    for name in (*_OF_ANY_RUN, *at_least_one):
        if getattr(config, name) < 1:
            raise errors.ConfigError(f"{name}={getattr(config, name)} must be at least 1")


def read(path: pathlib.Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the values of a YAML file with `key=value` overrides (values as YAML)."""
    values = read_yaml(path)
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise errors.ConfigError(f"--set {override!r} must be key=value")
        values[key] = parse_yaml(text, f"--set {key}")
    return values


def from_mapping(values: Mapping[str, Any], kind: type[Kind] = TrainConfig) -> Kind:
    """Returns the config of a mapping; checks names and types."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise errors.ConfigError(f"unknown key {key!r}{errors.nearest(key, fields)}")
    for name, field in fields.items():
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and name not in values:
            raise errors.ConfigError(f"{name} is missing")
    return kind(**{key: _typed(key, str(fields[key].type), v) for key, v in values.items()})


def _typed(key: str, kind: str, value: Any) -> Any:
    # Annotations are strings in this module (PEP 563).
    try:
        match kind:
            case "bool" if isinstance(value, bool):
                return value
            case "str" | "str | None" if isinstance(value, str):
                return value
            case "int" if isinstance(value, int) and not isinstance(value, bool):
                return value
            case "float" | "float | None" if isinstance(value, int | float | str):
                return float(value)  # YAML reads 1e-3 as text
            case "float | None" | "str | None" if value is None:
                return None
            case "tuple[float, ...]" if isinstance(value, list | tuple):
                return tuple(float(v) for v in value)
            case "tuple[int, ...]" if isinstance(value, list | tuple):
                return tuple(int(v) for v in value)
            case "tuple[str, ...]" if isinstance(value, list | tuple):
                return tuple(str(v) for v in value)
    except (TypeError, ValueError):
        pass  # the text is no number: raise the same error as for any other wrong type
    raise errors.ConfigError(f"{key}={value!r} must be of type {kind}")
