"""Group-limited top-k routing, a warp per token, as one kernel.

XLA alone runs this op as three sorts and some ten launches: 100 us for 2048 tokens and 16 us for 32
(H200). Here a lane holds E / 32 neighbouring experts of a token, as integers that compare as the
scores do (`lane_code.ordered`). A group is a few neighbouring lanes: shuffles between them find its
two best scores. The lanes of groups that are not kept drop their experts. Then k rounds pick the
experts in descending order. A round takes two warp reductions: the maximum, and the lowest index
that has it; that expert is dropped for the next round. With softmax scores the logits themselves
are compared, and the weights are exponentials of their distances to the best one.

The T * E * 4 bytes do not matter; the bound is latency and, with thousands of tokens, instructions:
about 650 a warp for 256 experts. Two other ways were slower. A warpgroup per token, with reductions
through shared memory, took 11.9 us for 2048 tokens and one more launch for the groups' scores. A
tile of 64 tokens in the accumulator layout, whose rows reduce by two shuffles, needed 18 thousand
instructions a thread on one or few SMs: 83 us.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.hopper import compat, lane_code
from pallas_kernels.hopper.lane_code import WARP, Float, Int
from pallas_kernels.top_k_routing.checks import Scores

_TOKENS_PER_CTA = 4  # a warpgroup
_DROPPED = -(2**31)  # below every score: a dropped or taken expert
_NO_EXPERT = 2**30


def why_not(
    *,
    num_experts: int,
    num_groups: int = 1,
    experts_per_token: int = 1,
    renormalizes: bool = True,
    has_admitted: bool = False,
) -> str | None:
    """Returns why this kernel cannot route the shape, or None."""
    if not renormalizes:
        return "weights must sum to a constant, these are not renormalised"
    if has_admitted:
        return "reads no set of admitted experts for each token (block routing)"
    if num_experts % 128 or num_experts > 1024:
        return f"experts must be a multiple of 128 and at most 1024, {num_experts=}"
    if WARP % num_groups or experts_per_token > WARP:
        return (
            f"groups must divide {WARP}, and a token takes at most {WARP} experts: "
            f"{num_groups=}, {experts_per_token=}"
        )
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The static facts of a routing."""

    tokens: int
    num_experts: int
    experts_per_token: int
    num_groups: int
    kept_groups: int
    scaling_factor: float
    scores: Scores = "sigmoid"

    @property
    def experts_per_lane(self) -> int:
        return self.num_experts // WARP


def top_k_routing(
    router_logits: Float32[Array, "T E"],
    expert_bias: Float32[Array, " E"] | None,
    *,
    experts_per_token: int,
    num_groups: int,
    kept_groups: int,
    scaling_factor: float,
    scores: Scores = "sigmoid",
    renormalizes: bool = True,
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """Returns (ids, weights) of k experts a token; see `pallas_kernels.top_k_routing`."""
    T, E = router_logits.shape
    k = experts_per_token
    reason = why_not(
        num_experts=E, num_groups=num_groups, experts_per_token=k, renormalizes=renormalizes
    )
    if reason is not None:
        raise ValueError(f"top_k_routing: {reason}: router_logits {router_logits.shape}")
    rule = Rule(
        tokens=T,
        num_experts=E,
        experts_per_token=k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        scaling_factor=scaling_factor,
        scores=scores,
    )
    arrays = [router_logits.reshape(-1)] + ([] if expert_bias is None else [expert_bias])

    def route_tokens(*gmem):
        @compat.inline_mgpu(arg_types=(*(plgpu.RefType(),) * len(gmem), plgpu.Layout.WG_SPLAT(())))
        def route(_, logits, *rest):
            *bias, ids, weights, cta = rest
            at = lane_code.scalar(cta)
            route_token(logits, bias[0] if bias else None, ids, weights, at, rule)

        route(*gmem, lax.axis_index("cta"))

    ids, weights = compat.kernel(
        route_tokens,
        out_type=(
            jax.ShapeDtypeStruct((T * k,), jnp.int32),
            jax.ShapeDtypeStruct((T * k,), jnp.float32),
        ),
        grid=(-(-T // _TOKENS_PER_CTA),),
        grid_names=("cta",),
        # Scores decide who is chosen: the exponential must be that of the reference.
        compiler_params={"approx_math": False},
    )(*arrays)
    return ids.reshape(T, k), weights.reshape(T, k)


def route_token(logits, bias, ids, weights, cta: Int, rule: Rule) -> None:
    """Routes the token of this thread's warp; the refs (`bias` may be None) are flat."""
    E, k = rule.num_experts, rule.experts_per_token
    warp, lane = lane_code.thread() // WARP, lane_code.thread() % WARP
    token = cta * _TOKENS_PER_CTA + warp
    row = lane_code.least(token, rule.tokens - 1) * E  # a warp without a token writes nothing
    first = lane * rule.experts_per_lane
    experts = [first + place for place in range(rule.experts_per_lane)]
    scores = []
    for place in range(0, rule.experts_per_lane, 4):
        choice = lane_code.load_four_floats(logits, row + first + place)
        if rule.scores == "sigmoid":
            choice = [_sigmoid(logit) for logit in choice]
        if bias is not None:
            biases = lane_code.load_four_floats(bias, first + place)
            choice = [score + shift for score, shift in zip(choice, biases, strict=True)]
        scores += [lane_code.ordered(score) for score in choice]
    if rule.num_groups > 1:
        kept = _group_is_kept(scores, lane, rule)
        scores = [lane_code.select(kept, score, _DROPPED) for score in scores]

    # Lane i keeps choice i; the lanes from k on keep the last choice, so all load a valid logit.
    mine = lane_code.constant(0)
    for choice in range(k):
        best = scores[0]
        for score in scores[1:]:
            best = lane_code.signed_most(best, score)
        best = lane_code.signed_most_of_warp(best)
        attaining = lane_code.constant(_NO_EXPERT)
        for expert, score in reversed(list(zip(experts, scores, strict=True))):
            attaining = lane_code.select(score.equals(best), expert, attaining)
        chosen = lane_code.least_of_warp(attaining)
        mine = lane_code.select(lane < choice, mine, chosen)
        scores = [
            lane_code.select(expert.equals(chosen), _DROPPED, score)
            for expert, score in zip(experts, scores, strict=True)
        ]
    weight = lane_code.load_float(logits, row + mine)
    if rule.scores == "sigmoid":
        weight = _sigmoid(weight)
    else:
        weight = lane_code.exp(weight + -lane_code.of_lane(weight, 0))  # lane 0 has the best one
    total = lane_code.of_lane(weight, 0)
    for choice in range(1, k):
        total += lane_code.of_lane(weight, choice)
    scale = lane_code.constant_float(rule.scaling_factor) / (total + 1e-20)
    with lane_code.when((token < rule.tokens) & (lane < k)):
        lane_code.store(ids, token * k + lane, mine)
        lane_code.store(weights, token * k + lane, weight * scale)


def _sigmoid(x: Float) -> Float:
    one = lane_code.constant_float(1.0)
    return one / (one + lane_code.exp(-x))


def _group_is_kept(scores: list[Int], lane: Int, rule: Rule) -> lane_code.Bit:
    """Returns whether fewer than `kept_groups` groups beat the group of this lane.

    Groups compare by the sum of their two best scores. Of equal groups, the first one wins.
    """
    high, second = scores[0], lane_code.constant(_DROPPED)
    for score in scores[1:]:
        second = lane_code.signed_most(second, lane_code.signed_least(high, score))
        high = lane_code.signed_most(high, score)
    lanes = WARP // rule.num_groups
    for step in range(lanes.bit_length() - 1):
        other_high = lane_code.of_partner(high, 1 << step)
        other_second = lane_code.of_partner(second, 1 << step)
        lower_high = lane_code.signed_least(high, other_high)
        second = lane_code.signed_most(second, other_second)
        second = lane_code.signed_most(second, lower_high)
        high = lane_code.signed_most(high, other_high)
    total = lane_code.from_ordered(high) + lane_code.from_ordered(second)
    mine, group = lane_code.ordered(total), lane // lanes
    better = lane_code.constant(0)
    for rival in range(rule.num_groups):
        other = lane_code.of_lane(mine, rival * lanes)
        ties = other.equals(mine) & (lane_code.constant(rival) < group)
        better += lane_code.select(mine.signed_less(other) | ties, 1, 0)
    return better < rule.kept_groups
