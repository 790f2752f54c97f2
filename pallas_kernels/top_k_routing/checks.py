"""Which arguments routing accepts."""

from typing import Literal

import jax
import jax.numpy as jnp

Scores = Literal["sigmoid", "softmax"]


def check_shapes(
    router_logits: jax.Array,
    expert_bias: jax.Array | None,
    experts_per_token: int,
    num_groups: int,
    kept_groups: int,
    scores: Scores,
    admitted: jax.Array | None,
) -> None:
    """Raises ValueError if the arrays and numbers do not fit together."""
    bias = "None" if expert_bias is None else f"{expert_bias.dtype}{expert_bias.shape}"
    shapes = (
        f"router_logits {router_logits.dtype}{router_logits.shape}, expert_bias {bias}, "
        f"{experts_per_token=}, {num_groups=}, {kept_groups=}, {scores=}"
    )
    E = router_logits.shape[-1]
    problems = {
        "router_logits must be float32 [T, E]": router_logits.ndim != 2
        or router_logits.dtype != jnp.float32,
        "expert_bias must be float32 [E]": expert_bias is not None
        and (expert_bias.shape != (E,) or expert_bias.dtype != jnp.float32),
        "scores must be sigmoid or softmax": scores not in ("sigmoid", "softmax"),
        "softmax scores have neither bias nor groups": scores == "softmax"
        and (expert_bias is not None or num_groups != 1),
        "admitted must be bool [T, E]": admitted is not None
        and (admitted.shape != router_logits.shape or admitted.dtype != jnp.bool_),
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
