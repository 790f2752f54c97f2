"""A ring of stages in shared memory, between a warpgroup that loads and warpgroups that multiply.

Steps are counted over all work of a CTA, and step i uses stage i modulo the number of stages, so
the loads of the next piece of work start before this one has ended. A stage is full once all copies
to it have landed, and empty once all readers have released it. If the CTAs of a cluster share
copies (TMA multicast), a stage is empty once the readers of all these CTAs have released it: nobody
may overwrite what another CTA still multiplies.
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

    `copies` is the number of copies that fill a stage, `readers` the number of warpgroups of a CTA
    that release it. `shared_along` names the axes of a cluster along which CTAs share copies.
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

    def stage_of(self, step: jax.Array | int) -> jax.Array:
        return lax.rem(step, jnp.int32(self.stages))

    def wait_until_empty(self, step: jax.Array) -> None:
        """Waits until the step's stage may be loaded: at once in the ring's first round."""

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.stage_of(step)])

    def release(self, step: jax.Array | int) -> None:
        """Tells the loading warpgroup that this one has read the step's stage."""
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])

    def drain(self, steps: jax.Array | int) -> None:
        """Waits, after the last of `steps` loads, until all of them have been read.

        A CTA must wait for every arrival before it ends, and it must not end while another CTA of
        the cluster still multicasts to it.
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
        """Calls multiply(step, stage) for `steps` steps from `first` (default 0), each once full.

        `wgmmas` is the number of wgmmas that one call starts. They stay in flight while this waits
        for the next stage; then the stage of the step before is released. The caller releases the
        last stage.
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
