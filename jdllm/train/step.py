"""The compiled training step: loss, optimiser, weight average and expert balance.

Master weights, moments and the average are float32; the forward pass runs on a copy that is cast
to the model's own dtypes. Expert biases get no gradient, because they select experts but do not
weigh them. Each bias moves by a fixed step toward equal load, as in DeepSeek-V3, so no auxiliary
loss disturbs the objective.

Letters besides those of the project: L positions of a row of the model's input, N positions with
targets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PRNGKeyArray

import pallas_kernels
from jdllm import errors
from jdllm.layers import attention, moe
from jdllm.models import decoder_config, loading, random_weights, registry
from jdllm.spec import AttentionPattern
from jdllm.train import canvas_objective, objective, optimizers, question_noise
from jdllm.train.config import TrainConfig
from jdllm.train.dropout import Dropout

Params = dict[str, jax.Array]
Noise = objective.NoiseConfig | canvas_objective.CanvasNoiseConfig
EXPERT_BIAS = "expert_bias"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The model to train: static graph, shapes in compute dtypes, parsed config."""

    graphdef: nnx.GraphDef
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    config: decoder_config.DecoderConfig

    def cast(self, params: Mapping[str, jax.Array]) -> Params:
        """Returns the parameters in the dtypes of the forward pass."""
        return {path: array.astype(self.shapes[path].dtype) for path, array in params.items()}

    @property
    def mask_token_id(self) -> int:
        """The id of the mask token; a parsed config has one."""
        mask_token_id = self.config.spec.diffusion.mask_token_id
        assert mask_token_id is not None
        return mask_token_id


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The content of a checkpoint; the optimiser's moments began at `start_step`."""

    step: Int32[Array, ""]
    start_step: Int32[Array, ""]
    params: Params
    average: Params
    opt_state: optax.OptState


def build_network(hf_config: Mapping[str, Any], dtype: str) -> Network:
    """Returns the model of a config.json, without weights; raises if it cannot be trained."""
    architecture = registry.architecture_of(hf_config)
    family = registry.family(architecture)
    config = family.parse_config(hf_config)
    diffusion = config.spec.diffusion
    if diffusion.is_shifted or diffusion.attention_pattern is AttentionPattern.CAUSAL:
        raise errors.ConfigError(
            f"{architecture}: training needs block-causal or full attention and a logit row per "
            f"position; this family has {diffusion.attention_pattern} attention, "
            f"{diffusion.logit_alignment} logits"
        )
    routed = (one.feed_forward for one in config.layers)
    if any(isinstance(one, moe.MoEConfig) and not one.router.has_bias for one in routed):
        raise errors.ConfigError(
            f"{architecture}: training balances experts by a bias of the router, which this family "
            "does not have"
        )
    if hf_config.get("expert_capacity"):
        raise errors.ConfigError(
            f"config.json: expert_capacity={hf_config['expert_capacity']} is not supported in "
            "training, whose rows do not begin at the edges of blocks"
        )
    graphdef, shapes = family.abstract(config, dtype=jnp.dtype(dtype), implementation="dense")
    return Network(graphdef=graphdef, shapes=shapes, config=config)


def noise_config(network: Network, config: TrainConfig) -> Noise:
    """Returns how to mask the family's rows; raises if the family lacks an option."""
    diffusion = network.config.spec.diffusion
    if diffusion.kind == "block":
        return objective.NoiseConfig(
            block_size=diffusion.block_size,
            answer_blocks=config.noise_blocks or config.answer_blocks,
            copies=config.noise_copies,
            full_mask_fraction=config.full_mask_fraction,
            mask_token_id=network.mask_token_id,
        )
    if config.noise_copies != 1:
        raise errors.ConfigError(
            f"noise_copies={config.noise_copies} must be 1 for {network.config.spec.architecture}: "
            "with full attention a row is masked once, in place"
        )
    return canvas_objective.CanvasNoiseConfig(
        block_size=diffusion.block_size,
        full_mask_fraction=config.full_mask_fraction,
        mask_token_id=network.mask_token_id,
    )


def init_params(network: Network, seed: int) -> Params:
    """Returns float32 starting weights; the deeper the model, the smaller its residual branches."""
    shapes = {p: jax.ShapeDtypeStruct(s.shape, jnp.float32) for p, s in network.shapes.items()}
    params = random_weights.drawn(shapes, seed=seed, num_layers=network.config.spec.num_layers)
    params["word_embeddings"] = params["word_embeddings"] * 0.5
    return params


def init_state(config: TrainConfig, params: Params, *, average: Params, step: int) -> TrainState:
    """Returns a state at `step` with fresh moments; the warm-up begins at this step."""
    return TrainState(
        step=jnp.int32(step),
        start_step=jnp.int32(step),
        params=params,
        average=jax.tree.map(jnp.copy, average),
        opt_state=optimizers.build(config).init(params),
    )


def _nothing_dropped(x: Array) -> Array:
    return x


def forward(
    network: Network,
    params: Params,
    batch: objective.NoisyBatch,
    drop: Callable[[Array], Array] = _nothing_dropped,
    attention_implementation: str = "xla",
) -> tuple[Float32[Array, "B*N V"], dict[str, Float32[Array, " E"]]]:
    """Returns the logits of the positions with targets, and the load of each router's experts.

    Rows of question targets, if any, come after all others. The key of a load is the path of the
    router's expert bias. `drop` is applied to the embeddings and to the residual branches.
    """
    B, L = batch.tokens.shape
    model = loading.merge(network.graphdef, params)
    V = network.config.spec.vocab_size
    # A product instead of a lookup, whose gradient adds up the many padding rows one by one.
    one_hot = jax.nn.one_hot(batch.tokens.reshape(-1), V, dtype=model.word_embeddings.dtype)
    routed = [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, moe.SparseMoE)]
    loads = []

    see = attention.dense_attend(batch.visible, B, implementation=attention_implementation)

    def attend(projection, cache):
        out, cache = see(projection, cache)
        return drop(out), cache

    def feed_forward(mlp, x, valid):
        if not isinstance(mlp, moe.SparseMoE):
            return tuple(map(drop, mlp(x)))
        ids, weights = mlp.router(x)
        loads.append(_load(ids, valid, mlp.router.config.num_experts))
        return (drop(_all_experts(mlp, x, ids, jnp.where(valid[:, None], weights, 0.0))),)

    hidden, _ = model.run_layers(
        drop(model.mix(one_hot)),
        batch.positions.reshape(-1),
        attend=attend,
        caches=[None] * len(model.layers),
        valid=batch.valid.reshape(-1),
        feed_forward=feed_forward,
    )
    hidden = hidden.reshape(B, L, -1)
    parts = [hidden[:, L - batch.targets.shape[1] :]]
    if batch.question is not None:
        parts.append(jnp.take_along_axis(hidden, batch.question.places[..., None], axis=1))
    rows = jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    paths = [f"layers.{i}.mlp.router.{EXPERT_BIAS}" for i in routed]
    return model.logits(rows), dict(zip(paths, loads, strict=True))


def _all_experts(
    mlp: moe.SparseMoE,
    x: Float[Array, "T D"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
) -> Float[Array, "T D"]:
    """Returns `mlp(x)`, computed as one wide network that runs all experts on all tokens.

    The experts are so narrow that two large products take half the time of one expert after
    another.
    """
    experts = mlp.experts
    E, D, F = experts.w_down.shape
    chosen = jax.nn.one_hot(ids, E, dtype=jnp.float32) * weights[:, :, None]  # [T, k, E]
    gate, up = pallas_kernels.split_gate_up(experts.w_gate_up[...])
    gate, up = (x @ part.reshape(E * F, D).T for part in (gate, up))  # [T, E * F] each
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    hidden = hidden.reshape(-1, E, F) * jnp.sum(chosen, axis=1)[:, :, None]
    w_down = experts.w_down[...].transpose(0, 2, 1).reshape(E * F, D)
    out = hidden.reshape(-1, E * F).astype(x.dtype) @ w_down
    shared = mlp.shared_experts
    if shared is None:
        return out
    return out + pallas_kernels.swiglu(x, shared.w_gate_up[...], shared.w_down[...]).astype(x.dtype)


def _load(
    ids: Int[Array, "T k"], valid: Bool[Array, " T"], num_experts: int
) -> Float32[Array, " E"]:
    chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.float32).sum(axis=1)  # [T, E]
    load = jnp.sum(chosen * valid[:, None], axis=0)
    return jax.lax.stop_gradient(load / jnp.maximum(jnp.sum(load), 1.0))


def loss(
    network: Network,
    params: Params,
    batch: objective.NoisyBatch,
    *,
    dropout: Dropout | None = None,
    question_loss: float = 0.0,
    attention_implementation: str = "xla",
) -> tuple[Float32[Array, ""], tuple[Float32[Array, ""], Params]]:
    """Returns (loss, (token accuracy, loads)) for float32 parameters.

    The accuracy is that of the answers. Question targets count `question_loss` times as much.
    """
    logits, loads = forward(
        network,
        network.cast(params),
        batch,
        dropout or _nothing_dropped,
        attention_implementation,
    )
    rows = batch.targets.size
    value, accuracy = objective.masked_cross_entropy(logits[:rows], batch.targets, batch.weights)
    if batch.question is not None:
        guessed, _ = objective.masked_cross_entropy(
            logits[rows:], batch.question.tokens, batch.question.weights
        )
        value = value + question_loss * guessed
    return value, (accuracy, loads)


def train_step(
    network: Network,
    config: TrainConfig,
    noise: Noise,
    question: question_noise.QuestionNoise | None = None,
) -> Callable[
    [TrainState, Mapping[str, jax.Array], Float32[Array, ""] | np.float32],
    tuple[TrainState, dict[str, jax.Array]],
]:
    """Returns the jitted `step(state, batch, learning rate) -> (state, metrics)`.

    The state is consumed.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, batch: Mapping[str, jax.Array], rate: Float32[Array, ""]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        targets = None
        if question is not None:
            batch, targets = question_noise.spoil(jax.random.fold_in(key, 2), batch, question)
        noisy = noisy_batch(key, batch, noise)
        if config.question_loss:
            noisy = dataclasses.replace(noisy, question=targets)
        dropout = None
        if config.dropout:
            dropout = Dropout(config.dropout, jax.random.fold_in(key, 3))

        def loss_of(params: Params) -> tuple[jax.Array, tuple[jax.Array, Params]]:
            return loss(
                network,
                params,
                noisy,
                dropout=dropout,
                question_loss=config.question_loss,
                attention_implementation=config.attention,
            )

        (value, (accuracy, loads)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        direction, opt_state = optimizers.build(config).update(grads, state.opt_state, state.params)
        params: Params = jax.tree.map(lambda a, d: a - rate * d, state.params, direction)
        for path, load in loads.items():
            push = jnp.sign(1.0 / load.shape[0] - load)
            params[path] = state.params[path] + config.balance_rate * push
        new = TrainState(
            step=state.step + 1,
            start_step=state.start_step,
            params=params,
            average=_averaged(state.average, params, state.step, config.ema_decay),
            opt_state=opt_state,
        )
        metrics = {
            "loss": value,
            "token_accuracy": accuracy,
            "learning_rate": rate,
            "grad_norm": optax.tree.norm(grads),
            "max_expert_load": jnp.max(jnp.stack(list(loads.values())))
            if loads
            else jnp.float32(0),
        }
        return new, metrics

    return step


def noisy_batch(
    key: PRNGKeyArray, batch: Mapping[str, jax.Array], noise: Noise
) -> objective.NoisyBatch:
    """Returns the masked form of a batch from `examples.pad_rows`."""
    tokens, prompt_lens = batch["tokens"], batch["prompt_lens"]
    match noise:
        case objective.NoiseConfig():
            return objective.add_noise(key, tokens, prompt_lens, batch["total_lens"], noise)
        case canvas_objective.CanvasNoiseConfig():
            return canvas_objective.add_noise(key, tokens, prompt_lens, batch["answer_ends"], noise)


def _averaged(average: Params, params: Params, step: Int[Array, ""], decay: float) -> Params:
    # A short memory at first: a long one would hold little but the random start.
    keep = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return {p: keep * average[p] + (1.0 - keep) * params[p] for p in params}
