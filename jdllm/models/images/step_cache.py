"""Steps that leave out all blocks but the first: a first-block cache of rows.

Between two steps of one image the blocks of a transformer change its tokens by nearly the same
amount. How nearly shows in the first block, which is cheap:

    change = mean |first - held first| / mean |held first|

where `first` is what the first block adds to the image tokens of a row (its residual), and the
held one is that of the row's last computed step. Where the change is below the row's threshold,
the row takes what the other blocks added in that step, instead of running them. The measure is
that of diffusers' `FirstBlockCacheConfig`. Means are over the image tokens of one row, in float32,
so no row sees another's.

The blocks run for all rows or for none: if one row of a launch computes, the others gain nothing.

Letters: B rows, T image tokens without padding, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

Tokens = Float[Array, "B T D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """What a row's last computed step added to its image tokens: the first block, and the rest."""

    first: Tokens
    rest: Tokens


class StepCache:
    """The cache of the rows of one forward, which is traced once: `through` is called once in it.

    `held` are the rows' residuals. `skips` (change [B]) -> [B] says which rows leave out the other
    blocks. After `through`, `kept` and `is_skipped` are what the forward leaves.
    """

    def __init__(self, held: Residuals, skips: Callable[[Float32[Array, " B"]], Bool[Array, " B"]]):
        self._held, self._skips = held, skips
        self.kept: Residuals | None = None
        self.is_skipped: Bool[Array, " B"] | None = None

    def through(self, before: Tokens, after_first: Tokens, rest: Callable[[], Tokens]) -> Tokens:
        """Returns the image tokens after all blocks.

        `before` and `after_first` are those before and after the first block; `rest` runs the other
        blocks, and gives the image tokens after them.
        """
        held, dtype = self._held, after_first.dtype
        first = _difference(after_first, before, held.first.dtype)
        is_skipped = self._skips(relative_change(first, held.first))
        # The whole branch is left out on the device, not only its result.
        computed = jax.lax.cond(jnp.all(is_skipped), lambda: after_first, rest)
        skips = is_skipped[:, None, None]
        reused = after_first.astype(jnp.float32) + held.rest.astype(jnp.float32)
        self.kept = Residuals(
            first=jnp.where(skips, held.first, first),
            rest=jnp.where(skips, held.rest, _difference(computed, after_first, held.rest.dtype)),
        )
        self.is_skipped = is_skipped
        # A row that computes gets what the blocks gave, not a sum with another rounding.
        return jnp.where(skips, reused.astype(dtype), computed)


def relative_change(new: Tokens, held: Tokens) -> Float32[Array, " B"]:
    """Returns mean |new - held| / mean |held| of each row: infinite or NaN if `held` is 0."""
    new, held = new.astype(jnp.float32), held.astype(jnp.float32)
    return jnp.mean(jnp.abs(new - held), axis=(1, 2)) / jnp.mean(jnp.abs(held), axis=(1, 2))


def _difference(new: Tokens, old: Tokens, dtype: jnp.dtype) -> Tokens:
    return (new.astype(jnp.float32) - old.astype(jnp.float32)).astype(dtype)
