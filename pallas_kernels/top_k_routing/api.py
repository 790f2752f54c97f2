"""Group-limited top-k routing of a mixture-of-experts layer: which experts, at which weights.

With "sigmoid" scores this is DeepSeek-V3's gate ("noaux_tc"), as LLaDA2 uses it. A bias changes
which experts are chosen but not their weights, and only experts of the best groups can be chosen.
With "softmax" scores it is Qwen3-MoE's gate, without bias and groups. The XLA implementation
(`reference.py`) is three `top_k`; the kernel (`mosaic_gpu.py`) is one launch.
"""

import functools

import jax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.top_k_routing import checks, mosaic_gpu, reference
from pallas_kernels.top_k_routing.checks import Scores


def choose(
    implementation: str = "auto",
    *,
    num_experts: int,
    num_groups: int = 1,
    experts_per_token: int = 1,
    renormalizes: bool = True,
    has_admitted: bool = False,
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = mosaic_gpu.why_not(
        num_experts=num_experts,
        num_groups=num_groups,
        experts_per_token=experts_per_token,
        renormalizes=renormalizes,
        has_admitted=has_admitted,
    )
    return dispatch.choose("top_k_routing", implementation, refusals={"mosaic_gpu": reason})


def top_k_routing(
    router_logits: Float32[Array, "T E"],
    expert_bias: Float32[Array, " E"] | None,
    *,
    experts_per_token: int,
    num_groups: int = 1,
    kept_groups: int = 1,
    scaling_factor: float = 1.0,
    scores: Scores = "sigmoid",
    renormalizes: bool = True,
    admitted: Bool[Array, "T E"] | None = None,
    implementation: str = "auto",
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """Returns (expert ids, weights) of the k chosen experts of each token, by descending score.

    The weights are the scores without the bias, divided by their sum if the gate `renormalizes`,
    times `scaling_factor`. "softmax" scores are those of all experts of the token, and have neither
    bias nor groups. Of equal scores (of "softmax": equal logits), the lower id comes first. Only
    `admitted` experts are chosen; every token needs k of them. A token with NaN logits gets
    arbitrary ids; on a GPU they are in range.
    """
    checks.check_shapes(
        router_logits, expert_bias, experts_per_token, num_groups, kept_groups, scores, admitted
    )
    chosen = choose(
        implementation,
        num_experts=router_logits.shape[1],
        num_groups=num_groups,
        experts_per_token=experts_per_token,
        renormalizes=renormalizes,
        has_admitted=admitted is not None,
    )
    return _top_k_routing(
        router_logits,
        expert_bias,
        admitted,
        experts_per_token=experts_per_token,
        num_groups=num_groups,
        kept_groups=kept_groups,
        scaling_factor=scaling_factor,
        scores=scores,
        renormalizes=renormalizes,
        implementation=chosen.implementation,
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "experts_per_token", "num_groups", "kept_groups", "scaling_factor", "scores",
        "renormalizes", "implementation",
    ),
)  # fmt: skip
def _top_k_routing(router_logits, expert_bias, admitted, *, implementation, **rule):
    if implementation == "mosaic_gpu":
        return lowered_once.call(mosaic_gpu.top_k_routing, router_logits, expert_bias, **rule)
    return reference.top_k_routing(router_logits, expert_bias, admitted=admitted, **rule)
