"""Turns a checkpoint's generation_config.json into the sampling defaults of its requests.

Each key is used, or does not change the output, or is named in one warning at start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jdllm import errors
from jdllm.engine.start import algorithm_defaults
from jdllm.options import sampling_params

logger = logging.getLogger(__name__)

# Keys of generation_config.json that are used, or do not change the output.
_HONOURED = frozenset(
    """
    do_sample temperature top_p top_k min_p repetition_penalty dllm
    mask_token_id eos_token_id bos_token_id pad_token_id
    decoder_start_token_id max_length use_cache cache_implementation cache_config
    transformers_version _from_model_config output_attentions output_hidden_states
    output_scores output_logits return_dict_in_generate
    """.split()  # noqa: SIM905
)
# Filters of the distribution, and the values that turn each of them off.
_FILTERS: dict[str, tuple[Any, ...]] = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1)}
# Other sampling keys of Hugging Face, and the value of each that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "early_stopping": False,
    "remove_invalid_values": False,
    "renormalize_logits": False,
}


def default_sampling(
    generation_config: Mapping[str, Any], *, filters: bool = True, draws_its_own_way: bool = False
) -> sampling_params.SamplingParams:
    """Returns the checkpoint's sampling defaults: greedy unless it sets `do_sample`.

    With `draws_its_own_way` the family's algorithm always samples, by options of its own.

    One warning names the keys that ask for something the engine cannot do. `filters` says
    whether the family's algorithms know top_p and top_k.
    """
    if not filters:
        generation_config = _without_filters(generation_config)
    # Other keys are those of its algorithm: `algorithm_defaults` reads them.
    own = algorithm_defaults.GENERATION_KEYS if draws_its_own_way else frozenset()
    ignored = [
        f"{key}={value!r}"
        for key, value in generation_config.items()
        if key not in own and _is_ignored(key, value)
    ]
    if ignored:
        logger.warning("generation_config.json: not supported, ignored: %s", ", ".join(ignored))
    do_sample = generation_config.get("do_sample") or False
    if not isinstance(do_sample, bool):
        raise errors.ConfigError(f"generation_config.json: {do_sample=} must be true or false")
    values: dict[str, Any] = {
        "temperature": float(do_sample),
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    given = {key: generation_config.get(key) for key in values}
    given = {key: value for key, value in given.items() if value is not None}
    # The penalty also changes what a greedy request writes.
    used = given if do_sample else {k: v for k, v in given.items() if k == "repetition_penalty"}
    fixed: dict[str, Any] = {"temperature": 1.0} if draws_its_own_way else {}
    try:
        defaults = sampling_params.SamplingParams(**values | used | fixed)
    except errors.RequestError as error:
        raise errors.ConfigError(f"generation_config.json: {error}") from error
    try:
        sampling_params.SamplingParams(**values | given)
    except errors.RequestError as error:
        logger.warning("generation_config.json: without effect, do_sample is false: %s", error)
    return defaults


def _without_filters(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without top_p and top_k; one warning says so if they had an effect."""
    kept = {key: value for key, value in generation_config.items() if key not in _FILTERS}
    left_out = [
        f"{key}={generation_config[key]!r}"
        for key, neutral in _FILTERS.items()
        if generation_config.get(key) not in neutral
    ]
    if left_out and generation_config.get("do_sample"):
        logger.warning(
            "generation_config.json: this model draws from the whole distribution, left out: %s",
            ", ".join(left_out),
        )
    return kept


def _is_ignored(key: str, value: Any) -> bool:
    """Returns whether a key of generation_config.json asks for something the engine cannot do."""
    if value is None or key in _HONOURED:
        return False
    if key in _NEUTRAL:
        return value != _NEUTRAL[key]
    try:
        sampling_params.check_neutral(key, value, ())
    except errors.RequestError:
        return True
    return False
