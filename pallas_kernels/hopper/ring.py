"""A ring of stages in shared memory, between a warpgroup that loads and warpgroups that multiply.

Steps are counted over all that a CTA does, and step i lies in stage i modulo the stages, so the
loads of the next piece of work run ahead through the end of this one. A stage is full once all
copies of it have landed, and empty once all readers have released it. Of a cluster whose CTAs share
copies (TMA multicast), a stage is empty once the readers of all of them have: nobody may overwrite
what another CTA still multiplies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def barriers(
    stages: int, *, copies: int, readers: int, shared_along: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """Returns the scratch types of a ring's barriers: full and empty.

    `copies` fill a stage, `readers` of a CTA release it; `shared_along` names the axes of a cluster
    along which CTAs share copies.
    """
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    if shared_along:
        empty = plgpu.ClusterBarrier(
            collective_axes=shared_along, num_arrivals=readers, num_barriers=stages
        )
    else:
        empty = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    return full, empty


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The stages of a kernel, inside its body; `full` and `empty` are refs of `barriers`."""

    stages: int
    full: Any
    empty: Any

    def stage_of(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.stages))

    def wait_until_empty(self, step: jax.Array) -> None:
        """Waits until the step's stage may be loaded: at once in the ring's first round."""

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.stage_of(step)])

    def release(self, step: jax.Array) -> None:
        """Says that this warpgroup has read the step's stage."""
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])

    def drain(self, steps: jax.Array | int) -> None:
        """Waits, after the last of `steps` loads, until all of them have been read.

        Nobody may leave an arrival that is not waited for, nor end while another CTA of the cluster
        still multicasts to it.
        """

        def wait(step, _):
            plgpu.barrier_wait(self.empty.at[self.stage_of(step)])
            return ()

        most = max if isinstance(steps, int) else jnp.maximum
        lax.fori_loop(most(steps - self.stages, 0), steps, wait, ())

    def multiply(
        self,
        multiply: Callable[[jax.Array, jax.Array], None],
        steps: int,
        *,
        first: jax.Array | None = None,
        wgmmas: int = 1,
    ) -> None:
        """Calls multiply(step, stage) on each full stage of `steps` from `first`, or 0, on.

        It starts so many `wgmmas`. They stay in flight while the next stage is waited for, so the
        stage before it is the free one; the last stage is the caller's to release.
        """

        def one_step(k, _):
            step = k if first is None else first + k
            stage = self.stage_of(step)
            plgpu.barrier_wait(self.full.at[stage])
            multiply(step, stage)
            plgpu.wgmma_wait(wgmmas)
            pl.when(k > 0)(lambda: self.release(step - 1))
            return ()

        lax.fori_loop(0, steps, one_step, ())
