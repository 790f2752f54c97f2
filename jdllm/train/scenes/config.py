"""The options of the image recipe: an autoencoder first, then flow matching in its latents."""

from __future__ import annotations

import dataclasses
import math
import re

from jdllm import errors
from jdllm.train import config
from jdllm.train.config import RunConfig

_AT_LEAST_ONE = (
    "caption_tokens",
    "train_caption_tokens",
    "vae_batch_size",
    "chunk_scenes",
    "pool_scenes",
    "steps_per_chunk",
    "teacher_steps",
    "policy_group",
    "dp_size",
)
_SHARED = ("batch_size", "vae_batch_size", "chunk_scenes")
_SIZE = re.compile(r"(\d+)x(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SceneConfig(RunConfig):
    """All options of a run of the recipe `scenes`, except where it writes.

    `model_path` is a pipeline folder without weights and tokenizer. The first stage trains its
    autoencoder for `vae_steps` or `vae_minutes`, the second the text encoder and the transformer
    together, until `num_steps` (of both stages) or `max_minutes` (of the run, evaluation and
    export excepted). Each stage warms up, stays at its learning rate and falls linearly to 0 over
    the last `decay_share` of itself, whether steps or minutes end it.

    With a `teacher` (see `reflow`) or with `policy_steps` (see `policy`) a run has the second stage
    only.
    """

    recipe: str = "scenes"
    model_path: str
    batch_size: int = 256  # latents per step of the second stage
    dp_size: int = 1  # devices that share each batch and each chunk
    # Of pictures, height x width. They take turns; one that stands here twice has two of them.
    sizes: tuple[str, ...] = ("64x64", "96x96", "128x128", "96x128", "128x96")
    caption_tokens: int = 64  # of the padded captions of held-out scenes, a multiple of 32
    train_caption_tokens: int = 32  # of those of steps; scenes with longer ones are not drawn
    vae_steps: int = 6_000
    vae_minutes: float | None = None
    vae_batch_size: int = 64
    vae_learning_rate: float = 1e-3
    kl_weight: float = 1e-3
    edge_weight: float = 1.0  # of the error of differences between neighbouring pixels
    caption_dropout: float = 0.1  # share of the captions that are empty, for guidance
    teacher: str | None = None  # a pipeline folder, or a bundled model's name
    teacher_steps: int = 32  # Euler steps of its samples
    teacher_guidance: float = 2.0  # as that of requests; 0: one forward a step
    teacher_tries: int = 0  # of each pair, until the oracle finds the sample right; 0: not judged
    policy_steps: int = 0  # Euler steps of own samples, from whose verdicts it learns; 0: none
    policy_group: int = 8  # of these samples of each caption, whose verdicts are compared
    policy_trust: float = 5.0  # how little one advantage moves velocities from those of the samples
    weight_decay: float = 0.01
    adam_b2: float = 0.99
    eval_steps: tuple[int, ...] = (1, 2, 4, 8, 16)  # of each picture
    eval_guidance: tuple[float, ...] = (0.0,)  # guidance scales at the end, at each of these steps
    pool_scenes: int = 400_000  # on the device, of all sizes; then new ones replace old ones
    chunk_scenes: int = 256  # drawn, or sampled, and moved at once
    steps_per_chunk: int = 8  # of a full pool; before, each step may bring a chunk
    # Processes that draw and, as many, that judge; 0: the main process, between steps.
    data_workers: int = 0

    def __post_init__(self) -> None:
        config.check(self, at_least_one=_AT_LEAST_ONE)
        for name in ("caption_tokens", "train_caption_tokens"):
            if getattr(self, name) % 32:
                raise errors.ConfigError(f"{name}={getattr(self, name)} must be a multiple of 32")
        for name in _SHARED:
            if getattr(self, name) % self.dp_size:
                raise errors.ConfigError(
                    f"{name}={getattr(self, name)} must be a multiple of dp_size={self.dp_size}"
                )
        if not 0 <= self.vae_steps < self.num_steps:
            raise errors.ConfigError(
                f"vae_steps={self.vae_steps} must be 0 to less than num_steps={self.num_steps}"
            )
        if not 0 <= self.caption_dropout < 1:
            raise errors.ConfigError(
                f"caption_dropout={self.caption_dropout} must be at least 0 and below 1"
            )
        if self.teacher is not None and self.vae_steps:
            raise errors.ConfigError(
                f"vae_steps={self.vae_steps} must be 0 with a teacher, whose autoencoder stays"
            )
        if self.teacher_tries < 0:
            raise errors.ConfigError(f"teacher_tries={self.teacher_tries} must be at least 0")
        if self.teacher_tries and self.teacher is None:
            raise errors.ConfigError(f"teacher_tries={self.teacher_tries} needs a teacher")
        if self.policy_steps < 0:
            raise errors.ConfigError(f"policy_steps={self.policy_steps} must be at least 0")
        if self.policy_steps and (self.teacher is not None or self.vae_steps):
            raise errors.ConfigError(
                f"policy_steps={self.policy_steps} needs vae_steps=0 and no teacher"
            )
        if self.policy_steps and self.caption_dropout:
            raise errors.ConfigError(
                f"caption_dropout={self.caption_dropout} must be 0 with policy_steps: verdicts are "
                "those of captions"
            )
        if self.policy_steps and (self.policy_group < 2 or self.chunk_scenes % self.policy_group):
            raise errors.ConfigError(
                f"policy_group={self.policy_group} must be at least 2 and divide "
                f"chunk_scenes={self.chunk_scenes}"
            )
        if not 0 < self.policy_trust < math.inf:
            raise errors.ConfigError(
                f"policy_trust={self.policy_trust} must be a finite number above 0"
            )
        if not 0 <= self.teacher_guidance < math.inf:
            raise errors.ConfigError(
                f"teacher_guidance={self.teacher_guidance} must be a finite number of at least 0"
            )
        if not self.eval_guidance or min(self.eval_guidance) < 0:
            raise errors.ConfigError(
                f"eval_guidance={self.eval_guidance} must be numbers of at least 0"
            )
        if self.data_workers < 0:
            raise errors.ConfigError(f"data_workers={self.data_workers} must be at least 0")
        if not self.eval_steps or min(self.eval_steps) < 1:
            raise errors.ConfigError(f"eval_steps={self.eval_steps} must be numbers of at least 1")
        if not self.sizes or not all(_SIZE.fullmatch(size) for size in self.sizes):
            raise errors.ConfigError(f"sizes={self.sizes} must be like 96x128 (height x width)")
        if self.pool_scenes < self.chunk_scenes * len(self.shapes):
            raise errors.ConfigError(
                f"pool_scenes={self.pool_scenes} must hold a chunk of {self.chunk_scenes} of each "
                f"of {len(self.shapes)} sizes"
            )

    @property
    def learns_samples(self) -> bool:
        """Whether samples, a teacher's or its own, take the place of drawn pictures."""
        return self.teacher is not None or self.policy_steps > 0

    @property
    def judges_samples(self) -> bool:
        """Whether the oracle reads them."""
        return self.policy_steps > 0 or self.teacher_tries > 0

    @property
    def sample_steps(self) -> int:
        """Euler steps of a sample."""
        return self.policy_steps or self.teacher_steps

    @property
    def sample_guidance(self) -> float:
        """As that of requests; 0: one forward a step."""
        return 0.0 if self.policy_steps else self.teacher_guidance

    @property
    def chunk_captions(self) -> int:
        """Different captions of a chunk."""
        return self.chunk_scenes // (self.policy_group if self.policy_steps else 1)

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """The sizes of successive steps as (height, width) in pixels, with repetitions."""
        pairs = (size.split("x") for size in self.sizes)
        return tuple((int(height), int(width)) for height, width in pairs)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The different sizes, in the order of their first turns."""
        return tuple(dict.fromkeys(self.turns))
