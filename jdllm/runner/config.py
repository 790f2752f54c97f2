"""What is static in the compiled steps of kinds that decode with a language model."""

from __future__ import annotations

import dataclasses

from jdllm import spec as spec_lib
from jdllm.kv_cache import pool as pool_lib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Shapes beside those of a bucket, and which rules are compiled.

    `num_slots`: rows whose states are kept. `max_launch_steps`: denoising steps, and blocks a
    row, of one launch. `fuses_commits`: a forward that persists a block begins the next one.
    """

    spec: spec_lib.ModelSpec
    pool: pool_lib.PoolConfig
    context_length: int
    num_slots: int
    algorithms: tuple[str, ...]
    max_launch_steps: int = 1
    fuses_commits: bool = True
    implementation: str = "auto"

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.spec.diffusion.block_size

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that are never proposed."""
        mask_id = self.spec.diffusion.mask_token_id
        return () if mask_id is None else (mask_id,)

    @property
    def pages_per_row(self) -> int:
        """Pages of the longest row; a context that ends inside a block needs all of that block."""
        longest = -(-self.context_length // self.block_size) * self.block_size
        return -(-longest // self.pool.page_size)
