"""The static facts of a launch of the unembedding kernel, and how it divides its work."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

ROWS = 64  # accumulator rows of a warpgroup
DEPTH = 64  # hidden columns of a stage: 128 bytes, the widest swizzle
WARPGROUPS = 2  # that compute; one more loads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnembedTile:
    """Tile parameters; `columns` is an upper bound, so that CTAs can have equal shares."""

    columns: int = 256  # ids of one accumulator, a multiple of 16 up to 256
    split: Literal["rows", "columns"] = "rows"  # what the two warpgroups divide
    pair: bool = False  # two CTAs share each w tile
    stages: int = 4
    sms: int = 132  # persistent CTAs
    teams: int = 1  # groups of rows at a time; each has its share of the CTAs

    def __post_init__(self) -> None:
        if self.columns % 16 or not 16 <= self.columns <= 256:
            raise ValueError(f"{self.columns=} must be a multiple of 16 up to 256")
        if self.stages < 2 or self.sms < 2 or self.teams < 1:
            raise ValueError(f"{self.stages=} and {self.sms=} must be at least 2, {self.teams=} 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    tile: UnembedTile
    T: int
    V: int
    D: int
    dtype: jnp.dtype
    forbidden_ids: tuple[int, ...]
    row_names: tuple[str, ...]  # the names of the per-row inputs
    has_num_rows: bool = False  # whether `num_rows` is an input
    is_part: bool = False  # whether w is a part of the vocabulary, and its first id an input

    @property
    def draws(self) -> bool:
        return "draw_first" in self.row_names

    @property
    def has_flags(self) -> bool:
        """Whether only the inputs tell which tiles need masks."""
        return "given_ids" in self.row_names or (self.is_part and bool(self.forbidden_ids))

    @property
    def cluster(self) -> int:
        return 2 if self.tile.pair else 1

    @property
    def cta_rows(self) -> int:
        return ROWS * (WARPGROUPS if self.tile.split == "rows" else 1)

    @property
    def group_rows(self) -> int:
        """Rows of a cluster."""
        return self.cta_rows * self.cluster

    @property
    def groups(self) -> int:
        return -(-self.T // self.group_rows)

    @property
    def padded_rows(self) -> int:
        return self.groups * self.group_rows

    @property
    def accumulators(self) -> int:
        """Accumulators side by side in a vocabulary tile."""
        return WARPGROUPS if self.tile.split == "columns" else 1

    @property
    def teams(self) -> int:
        """Groups of rows at a time; team i takes the groups i, i + teams, ..."""
        return min(self.tile.teams, self.groups)

    @property
    def _most_workers(self) -> int:
        return max(1, self.tile.sms // self.cluster // self.teams)

    @property
    def columns(self) -> int:
        """Ids of one accumulator: a multiple of 16, as equal over the workers as possible."""
        widest = self.tile.columns * self.accumulators
        rounds = -(-self.V // (widest * self._most_workers))
        even = -(-self.V // (rounds * self._most_workers * self.accumulators))
        return min(self.tile.columns, -(-even // 16) * 16)

    @property
    def tile_columns(self) -> int:
        return self.columns * self.accumulators

    @property
    def num_tiles(self) -> int:
        return -(-self.V // self.tile_columns)

    @property
    def workers(self) -> int:
        """Clusters of a team; in each group, a worker takes every `workers`-th tile."""
        return min(self._most_workers, self.num_tiles)

    @property
    def parts(self) -> int:
        """Partials of a row."""
        return self.workers * self.accumulators

    @property
    def depth_steps(self) -> int:
        return self.D // DEPTH
