"""The state of an image run, and one step of the optimiser on the weights of a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from jdllm.train import optimizers
from jdllm.train.recipe import Params
from jdllm.train.scenes import networks
from jdllm.train.scenes.config import SceneConfig

# The components that a stage trains.
STAGES = {
    "vae": (networks.VAE,),
    "flow": (networks.TEXT, networks.TRANSFORMER),
}
Value = TypeVar("Value")
Metrics = dict[str, Float32[Array, ""]]
Loss = Callable[[Params], tuple[Float32[Array, ""], Metrics]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SceneState:
    """The content of a checkpoint; the present stage's moments began at `start_step`."""

    step: Int32[Array, ""]
    start_step: Int32[Array, ""]
    params: Params
    average: Params
    opt_states: dict[str, optax.OptState]  # by stage

    @property
    def stage(self) -> str:
        """The present stage, which reads the device."""
        return "flow" if float(self.params[networks.FACTOR]) else "vae"


def init(config: SceneConfig, params: Params, *, average: Params, step: int) -> SceneState:
    """Returns a state at `step` with fresh moments."""
    return SceneState(
        step=jnp.int32(step),
        start_step=jnp.int32(step),
        params=params,
        average=jax.tree.map(jnp.copy, average),
        opt_states=jax.jit(lambda: _fresh(config, params))(),
    )


def _fresh(config: SceneConfig, params: Params) -> dict[str, optax.OptState]:
    return {stage: optimizers.build(config).init(own(params, stage)) for stage in STAGES}


def part(state: SceneState, stage: str) -> SceneState:
    """Returns the part of a state that a stage reads and writes: a launch passes each array."""
    return dataclasses.replace(
        state,
        params=own(state.params, stage),
        average=own(state.average, stage),
        opt_states={stage: state.opt_states[stage]},
    )


def whole(state: SceneState, new: SceneState) -> SceneState:
    """Returns a state with a part of it replaced."""
    return dataclasses.replace(
        new,
        params=state.params | new.params,
        average=state.average | new.average,
        opt_states=state.opt_states | new.opt_states,
    )


def own(params: Mapping[str, Value], stage: str) -> dict[str, Value]:
    """Returns the weights that a stage trains."""
    prefixes = tuple(f"{name}." for name in STAGES[stage])
    return {path: array for path, array in params.items() if path.startswith(prefixes)}


def apply(
    config: SceneConfig,
    state: SceneState,
    stage: str,
    loss: Loss,
    rate: Float32[Array, ""],
) -> tuple[SceneState, Metrics]:
    """Returns the state, or its part, after a step at a learning rate."""
    trained = own(state.params, stage)

    def of_trained(trained: Any) -> tuple[Float32[Array, ""], Metrics]:
        return loss(state.params | trained)

    (value, metrics), grads = jax.value_and_grad(of_trained, has_aux=True)(trained)
    moments = state.opt_states[stage]
    direction, moments = optimizers.build(config).update(grads, moments, trained)
    trained = jax.tree.map(lambda a, d: a - rate * d, trained, direction)
    taken = (state.step - state.start_step).astype(jnp.float32)
    # A short memory at first: a long one would hold little but the random start.
    keep = jnp.minimum(config.ema_decay, (1.0 + taken) / (10.0 + taken))
    average = {p: keep * state.average[p] + (1.0 - keep) * a for p, a in trained.items()}
    new = dataclasses.replace(
        state,
        step=state.step + 1,
        params=state.params | trained,
        average=state.average | average,
        opt_states=state.opt_states | {stage: moments},
    )
    norm = optax.tree.norm(grads)
    return new, metrics | {"loss": value, "grad_norm": norm, "learning_rate": rate}
