"""Group-limited top-k routing by XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.top_k_routing.checks import Scores


def top_k_routing(
    router_logits: Float32[Array, "T E"],
    expert_bias: Float32[Array, " E"] | None,
    *,
    experts_per_token: int,
    num_groups: int,
    kept_groups: int,
    scaling_factor: float,
    scores: Scores,
    renormalizes: bool,
    admitted: Bool[Array, "T E"] | None = None,
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """Returns (ids, weights) of k experts a token; see `pallas_kernels.top_k_routing`."""
    if scores == "softmax":
        score = jax.nn.softmax(router_logits, axis=-1)  # [T, E]
        choice = router_logits  # in the order of the scores, and without ties by rounding
    else:
        score = jax.nn.sigmoid(router_logits)
        choice = score if expert_bias is None else score + expert_bias
    if num_groups > 1:
        choice = _keep_best_groups(choice, num_groups, kept_groups)
    if admitted is not None:
        choice = jnp.where(admitted, choice, -jnp.inf)
    _, ids = jax.lax.top_k(choice, experts_per_token)
    weights = jnp.take_along_axis(score, ids, axis=-1)
    if renormalizes:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * scaling_factor


def _keep_best_groups(choice: jax.Array, num_groups: int, kept_groups: int) -> jax.Array:
    groups = choice.reshape(choice.shape[0], num_groups, -1)
    group_score = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)  # [T, groups]
    _, kept = jax.lax.top_k(group_score, kept_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(num_groups), axis=1)
    # -inf, not 0: 0 would win against an expert that has a negative bias.
    return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(choice.shape)
