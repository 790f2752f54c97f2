"""Group-limited top-k routing of a mixture-of-experts layer: which experts, at which weights.

DeepSeek-V3's sigmoid gate ("noaux_tc"), as LLaDA2 uses it: a bias selects but does not weigh, and
only experts of the best groups can be chosen. The XLA implementation is three `top_k`; the kernel
(`mosaic_gpu.py`) is one launch.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.top_k_routing import mosaic_gpu as gpu_kernel


def choose(
    implementation: str = "auto",
    *,
    num_experts: int,
    num_groups: int = 1,
    experts_per_token: int = 1,
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = gpu_kernel.why_not(
        num_experts=num_experts, num_groups=num_groups, experts_per_token=experts_per_token
    )
    return dispatch.choose("top_k_routing", implementation, refusals={"mosaic_gpu": reason})


@functools.partial(
    jax.jit,
    static_argnames=(
        "experts_per_token", "num_groups", "kept_groups", "scaling_factor", "implementation",
    ),
)  # fmt: skip
def top_k_routing(
    router_logits: jax.Array,  # float32 [T, E]
    expert_bias: jax.Array,  # float32 [E]
    *,
    experts_per_token: int,
    num_groups: int = 1,
    kept_groups: int = 1,
    scaling_factor: float = 1.0,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns (expert ids int32 [T, k], weights float32 [T, k]) by descending score.

    Equal scores go to the lower id. A token with NaN logits gets any ids, on a GPU in range.
    """
    _check_shapes(router_logits, expert_bias, experts_per_token, num_groups, kept_groups)
    chosen = choose(
        implementation,
        num_experts=router_logits.shape[1],
        num_groups=num_groups,
        experts_per_token=experts_per_token,
    )
    if chosen.implementation == "mosaic_gpu":
        return lowered_once.call(
            gpu_kernel.top_k_routing,
            router_logits,
            expert_bias,
            experts_per_token=experts_per_token,
            num_groups=num_groups,
            kept_groups=kept_groups,
            scaling_factor=scaling_factor,
        )
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


def _check_shapes(router_logits, expert_bias, experts_per_token, num_groups, kept_groups) -> None:
    shapes = (
        f"router_logits {router_logits.dtype}{router_logits.shape}, "
        f"expert_bias {expert_bias.dtype}{expert_bias.shape}, {experts_per_token=}, "
        f"{num_groups=}, {kept_groups=}"
    )
    E = router_logits.shape[-1]
    problems = {
        "router_logits must be float32 [T, E]": router_logits.ndim != 2
        or router_logits.dtype != jnp.float32,
        "expert_bias must be float32 [E]": expert_bias.shape != (E,)
        or expert_bias.dtype != jnp.float32,
        "num_groups must divide the experts": num_groups < 1 or E % num_groups != 0,
        "kept_groups must lie in [1, num_groups]": not 1 <= kept_groups <= num_groups,
    }
    if not any(problems.values()):
        reachable = kept_groups * (E // num_groups)
        problems["more experts per token than the kept groups hold"] = (
            not 1 <= experts_per_token <= reachable
        )
        problems["a group must hold at least two experts"] = num_groups > 1 and E // num_groups < 2
    for problem, found in problems.items():
        if found:
            raise ValueError(f"top_k_routing: {problem}: {shapes}")
