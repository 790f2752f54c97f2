"""Group-limited top-k routing by XLA."""

import jax
import jax.numpy as jnp


def top_k_routing(
    router_logits: jax.Array,  # float32 [T, E]
    expert_bias: jax.Array,  # float32 [E]
    *,
    experts_per_token: int,
    num_groups: int,
    kept_groups: int,
    scaling_factor: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns (ids int32 [T, k], weights float32 [T, k]); see `pallas_kernels.top_k_routing`."""
    scores = jax.nn.sigmoid(router_logits)  # [T, E]
    choice = scores + expert_bias
    if num_groups > 1:
        choice = _keep_best_groups(choice, num_groups, kept_groups)
    _, ids = jax.lax.top_k(choice, experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * scaling_factor


def _keep_best_groups(choice: jax.Array, num_groups: int, kept_groups: int) -> jax.Array:
    groups = choice.reshape(choice.shape[0], num_groups, -1)
    group_score = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)  # [T, groups]
    _, kept = jax.lax.top_k(group_score, kept_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(num_groups), axis=1)
    # -inf, not 0: an expert with a negative bias must not resurrect a dropped group.
    return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(choice.shape)
