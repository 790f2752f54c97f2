"""The static part of compiled steps, for kinds of rows that decode with a language model."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from jdllm.algorithms import lookup
from jdllm.kv_cache.pool import PoolConfig
from jdllm.spec import ModelSpec


class LoopOptions(TypedDict):
    """Arguments of `driver.run` that are the same for all launches."""

    implementation: str
    num_ranks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Shapes that do not depend on the bucket, and the algorithms that are compiled.

    `num_slots` counts the rows whose states stay on the device. `max_launch_steps` bounds the
    denoising steps of one launch, and the blocks that a row finishes in it. With `fuses_commits`,
    a forward that persists a block also begins the next one. With `num_ranks`, steps run on each
    rank of a mesh; `pool` is what one rank has.
    """

    spec: ModelSpec
    pool: PoolConfig
    context_length: int
    num_slots: int
    algorithms: tuple[str, ...]
    max_launch_steps: int = 1
    fuses_commits: bool = True
    num_ranks: int = 1
    implementation: str = "auto"

    @property
    def loop_options(self) -> LoopOptions:
        """What the loop of a launch (`launch/driver.py`) is told."""
        return {"implementation": self.implementation, "num_ranks": self.num_ranks}

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.spec.diffusion.block_size

    @property
    def is_shifted(self) -> bool:
        """Whether a row of logits predicts the position after its own."""
        return self.spec.diffusion.is_shifted

    @property
    def is_causal(self) -> bool:
        """Whether K,V of a written block are those of a causal forward."""
        return self.spec.diffusion.is_causal

    @property
    def mask_token_id(self) -> int:
        """The token of positions that are not written yet, for steps that write it."""
        mask_id = self.spec.diffusion.mask_token_id
        assert mask_id is not None, "these steps need a mask token, and the model has none"
        return mask_id

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that are never proposed."""
        mask_id = self.spec.diffusion.mask_token_id
        return () if mask_id is None else (mask_id,)

    @property
    def moves_tokens(self) -> bool:
        """Whether an algorithm is compiled that moves tokens, by the model's edit tokens."""
        return any(lookup.TABLE[name].moves_tokens for name in self.algorithms)

    @property
    def block_context(self) -> int:
        """Tokens of the longest row; if the context ends inside a block, the block counts whole.

        Blocks begin at multiples of the block size. Behind a context that is encoded causally, they
        and canvases of random tokens begin anywhere.
        """
        if self.is_causal or self.spec.diffusion.kind == "uniform":
            return self.context_length + self.block_size
        return -(-self.context_length // self.block_size) * self.block_size

    @property
    def pages_per_row(self) -> int:
        """Pages of the longest row."""
        return -(-self.block_context // self.pool.page_size)
