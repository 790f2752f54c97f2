"""The table of decoding algorithms: each with its options, their defaults, ranges and help.

`algorithms.py` has what reads it.
"""

from __future__ import annotations

from typing import Any

from jdllm import value_checks
from jdllm.algorithms.options import BLOCK, CANVAS, UNIFORM, Algorithm, Option


def _number(name: str, default: float | None, help: str, **bounds: Any) -> Option:
    return Option(name=name, type="number", default=default, help=help, **bounds)


def _share(name: str, default: float, help: str, **bounds: Any) -> Option:
    return _number(name, default, help, high=1, **bounds)


def _integer(name: str, default: int | None, help: str, **bounds: Any) -> Option:
    bounds = {"high": value_checks.LARGEST_INTEGER} | bounds
    return Option(name=name, type="integer", default=default, help=help, **bounds)


def _word(name: str, words: tuple[str, ...], help: str) -> Option:
    return Option(name=name, type="word", default=words[0], help=help, words=words)


_CONFIDENCE = "the probability above which a masked position is written"
_EDIT_CONFIDENCE = "the probability above which a token replaces another"
_ENTROPY = "the highest entropy in nats at which a masked position is written"
_CACHE_MODE = "which positions a step forwards; it reads the others from the cache"
_BLOCK_LENGTH = _integer(
    "block_length", 32, "positions per block", low=1, padding=1, counts_positions=True
)
_STEPS = "number of steps for the whole output"
_LOWEST = "the lowest probability at which a position is written"
_ALL_POSITIONS = "as many as positions of the block"
# Nats; no vocabulary has so much entropy.
_MOST_ENTROPY = 100

# Defaults of SGLang 0.5.23 (low_confidence.py, joint_threshold.py) and of the papers' releases.
# The first algorithm of a kind is its default.
TABLE: dict[str, Algorithm] = {
    "LowConfidence": Algorithm(
        name="LowConfidence",
        kind=BLOCK,
        writes="positions with a probability above `threshold`, or else the most probable one",
        options=(_share("threshold", 0.95, _CONFIDENCE),),
        takes_filters=True,
    ),
    "JointThreshold": Algorithm(
        name="JointThreshold",
        kind=BLOCK,
        writes="as `LowConfidence` does, and replaces written tokens by more probable ones",
        options=(
            _share("threshold", 0.5, _CONFIDENCE),
            _share("edit_threshold", 0.0, _EDIT_CONFIDENCE),
            _integer(
                "max_post_edit_steps",
                16,
                "most steps of a block after its last mask is written",
                high=4096,
            ),
            _number(
                "penalty_lambda",
                0.0,
                "subtracted from the logit of the token to the left",
                high=100,
            ),
        ),
        takes_filters=True,
        families="block_causal",
    ),
    "JointThresholdInDel": Algorithm(
        name="JointThresholdInDel",
        kind=BLOCK,
        writes="as `JointThreshold` does, and deletes and inserts positions (LLaDA2.2)",
        options=(
            _share("threshold", 0.5, _CONFIDENCE),
            _share("edit_threshold", 0.0, _EDIT_CONFIDENCE),
            _integer(
                "max_post_edit_steps",
                16,
                "most steps of a block without a mask of its beginning",
                high=64,
            ),
        ),
        takes_filters=True,
        families="block_causal",
        moves_tokens=True,
    ),
    "SDAR": Algorithm(
        name="SDAR",
        kind=BLOCK,
        writes="by SDAR's own rules: every step of a block writes its share of the positions, and "
        "`low_confidence_dynamic` all with a probability above `threshold` if these are more",
        options=(
            _word(
                "remasking_strategy",
                (
                    "low_confidence_dynamic",
                    "low_confidence_static",
                    "sequential",
                    "entropy_bounded",
                ),
                "which masked positions of the block a step writes",
            ),
            _share(
                "threshold",
                0.85,
                _CONFIDENCE,
                only_with=("remasking_strategy", ("low_confidence_dynamic",)),
            ),
            _integer(
                "denoising_steps",
                None,
                "steps of a block; each writes its share of the positions",
                low=1,
                counts_positions=True,
                unset=_ALL_POSITIONS,
                only_with=(
                    "remasking_strategy",
                    ("low_confidence_dynamic", "low_confidence_static", "sequential"),
                ),
            ),
            _number(
                "eb_threshold",
                0.35,
                "the highest sum of the entropies (nats) of the positions that a step writes",
                high=_MOST_ENTROPY,
                only_with=("remasking_strategy", ("entropy_bounded",)),
            ),
        ),
        takes_filters=True,
    ),
    "MaskedDiffusion": Algorithm(
        name="MaskedDiffusion",
        kind=BLOCK,
        writes="positions with a probability of at least `threshold`, and the most probable one; "
        "`low_confidence` and `leftmost` write a number of positions per step instead",
        options=(
            _word(
                "selection_policy",
                ("confidence_threshold", "low_confidence", "leftmost"),
                "which masked positions of the block a step writes",
            ),
            _share(
                "threshold",
                0.9,
                _LOWEST,
                only_with=("selection_policy", ("confidence_threshold",)),
            ),
            _integer(
                "max_denoising_steps",
                None,
                "most steps of a block; the last one writes all that are left",
                low=1,
                counts_positions=True,
                unset=_ALL_POSITIONS,
            ),
            Option(
                name="seed_first",
                type="flag",
                default=False,
                help="whether the causal forward of what precedes a block writes the block's first "
                "position; only for causal families",
            ),
        ),
        takes_filters=True,
    ),
    "HierarchyBlock": Algorithm(
        name="HierarchyBlock",
        kind=BLOCK,
        writes="one sub-block of the block after the other: positions with a probability above "
        "`threshold`, or else the most probable one (Fast-dLLM v2)",
        options=(
            _share("threshold", 0.9, _CONFIDENCE),
            _integer(
                "small_block_size",
                8,
                "positions of a sub-block",
                low=1,
                padding=1,
                counts_positions=True,
            ),
            Option(
                name="use_block_cache",
                type="flag",
                default=False,
                help="whether steps forward one sub-block and take the rest of the block from the "
                "block's last whole forward; an approximation, with less work",
            ),
        ),
        takes_filters=True,
        families="block_causal",
    ),
    "Autoregressive": Algorithm(
        name="Autoregressive",
        kind=BLOCK,
        writes="one token per forward, from left to right",
        options=(),
        takes_filters=True,
        families="causal",
        drafts=True,
    ),
    "LinearSpec": Algorithm(
        name="LinearSpec",
        kind=BLOCK,
        writes="the tokens of `Autoregressive`: drafts a block by denoising, and keeps those that "
        "a causal forward confirms",
        options=(
            _BLOCK_LENGTH,
            _share("threshold", 0.0, "the lowest probability at which a step drafts a position"),
        ),
        takes_filters=True,
        families="causal",
        drafts=True,
        uses_draft_adapter=True,
    ),
    "FullAttnMultiBlock": Algorithm(
        name="FullAttnMultiBlock",
        kind=CANVAS,
        writes="several blocks at once: positions with an entropy (nats) of at most `threshold` "
        "(d3LLM)",
        options=(
            _number("threshold", 0.5, _ENTROPY, high=_MOST_ENTROPY),
            _share(
                "block_add_threshold",
                0.1,
                "share of a block that must be written before the next one begins",
            ),
            _share(
                "decoded_token_threshold", 0.95, "an option of d3LLM; it never changes a result"
            ),
            Option(
                name="early_stop",
                type="flag",
                default=True,
                help="whether all positions after the first end token become the end of text at "
                "once",
            ),
            _word("cache_mode", ("exact", "delayed", "window"), _CACHE_MODE),
            _integer("cache_delay_iter", 2, "steps until a finished block is cached", padding=1),
            _integer(
                "refresh_interval",
                3,
                "steps from one forward of the whole canvas to the next",
                low=1,
                padding=1,
            ),
            _BLOCK_LENGTH,
        ),
        exact_modes=("exact",),
    ),
    "EntropyThreshold": Algorithm(
        name="EntropyThreshold",
        kind=CANVAS,
        writes="one block after the other, by entropy",
        options=(_number("threshold", 0.95, _ENTROPY, high=_MOST_ENTROPY), _BLOCK_LENGTH),
    ),
    "LLaDA": Algorithm(
        name="LLaDA",
        kind=CANVAS,
        writes="a fixed number of positions per step, block after block",
        options=(
            _integer("steps", None, _STEPS, low=1, unset="as many as positions"),
            _BLOCK_LENGTH,
            _word("remasking", ("low_confidence", "random"), "which positions are written first"),
            _number("cfg_scale", 0.0, "weight of classifier-free guidance; 0 is none", high=100),
        ),
        whole_blocks=True,
    ),
    "Dream": Algorithm(
        name="Dream",
        kind=CANVAS,
        writes="a share of the whole canvas per step",
        options=(
            _integer("steps", None, _STEPS, low=1, unset="as many as positions"),
            _word(
                "alg",
                ("origin", "maskgit_plus", "topk_margin", "entropy"),
                "how a step chooses its positions: by chance, or by a measure of confidence",
            ),
            _number(
                "alg_temp",
                0.0,
                "temperature of the choice by confidence; 0 takes the best",
                high=100,
            ),
            _share("eps", 1e-3, "the time at which the schedule ends"),
        ),
    ),
    "FastDLLM": Algorithm(
        name="FastDLLM",
        kind=CANVAS,
        writes="one block after the other: positions with a probability of at least `threshold`; "
        "`factor` or `steps` replaces that rule",
        options=(
            _share("threshold", 0.9, _LOWEST),
            _number(
                "factor",
                None,
                "f: the n-th most probable position is written if its probability is at least "
                "1 - f / (n + 1)",
                low=0.001,
                high=10000,
                unset="unused",
            ),
            _integer("steps", None, _STEPS, low=1, unset="unused"),
            _BLOCK_LENGTH,
            _word("cache_mode", ("none", "prefix", "dual"), _CACHE_MODE),
        ),
        alternatives=("factor", "steps", "threshold"),
        exact_modes=("none",),
    ),
    "Gemma4Renoise": Algorithm(
        name="Gemma4Renoise",
        kind=UNIFORM,
        writes="a canvas at once: a step draws all tokens, keeps those of the lowest entropies and "
        "puts random tokens into the other positions",
        options=(
            _integer("max_denoising_steps", 48, "most steps of a canvas", low=1),
            _number(
                "entropy_bound",
                0.1,
                "a drawn token is kept while the lower entropies (nats) sum to at most this",
                high=_MOST_ENTROPY * 4096,
            ),
            _number("t_max", 0.8, "temperature of the first step", low=0.01, high=100),
            _number("t_min", 0.4, "temperature that the steps approach", low=0.01, high=100),
            _number(
                "confidence_threshold",
                0.005,
                "the mean entropy (nats) below which a canvas may be done",
                high=_MOST_ENTROPY,
            ),
            _integer(
                "stability_threshold",
                1,
                "steps before that had the same most probable tokens when a canvas is done",
            ),
        ),
        has_own_temperature=True,
    ),
}
