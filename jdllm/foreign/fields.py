"""Fields of other servers' requests that this server does not serve, with their defaults.

`neutral_values` says what passes: the empty values and these defaults. Fields whose only default
is an empty value need no line here. `LABELS` are labels and hints that change no output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jdllm.foreign import names, neutral_values

Neutral = neutral_values.Defaults

# Fields of other engines; an error that names the field refuses every value but the neutral ones.
NEUTRAL_ONLY: Neutral = {
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ()),
    "custom_params": (None, {}),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "lora_path": (None,),
    "prompt_logprobs": (None, False, 0),
    "stream_interval": (None, 1),
    "spaces_between_special_tokens": (None, True),
}

# Names that are refused as "not supported" rather than as unknown.
_NEVER: Neutral = dict.fromkeys(
    (
        "audio", "audio_data", "background", "cache_salt", "chat_template", "custom_labels",
        "custom_logit_processor", "documents", "echo", "escape_special_tokens", "extra_key",
        "functions", "image_data",
        "include_stop_str_in_output", "input_embeds", "input_ids", "kv_transfer_params",
        "lora_path", "mm_processor_kwargs", "prediction", "prompt_embeds", "request_id",
        "return_bytes", "return_hidden_states", "return_meta_info", "return_prompt_token_ids",
        "return_routed_experts", "return_token_ids", "session_params", "store",
        "structured_outputs", "thinking_token_budget", "token_ids_logprob", "tools",
        "truncate_prompt_tokens", "video_data", "web_search_options",
    ),
    (),
)  # fmt: skip

COMMON: Neutral = {
    **_NEVER,
    "add_generation_prompt": (),  # a text has none
    "data_parallel_rank": (0,),
    "mm_payload": ("tensors",),
    "priority": (0,),
    "return_flat_raw_top_logprobs_b64": (True, False),  # the form of something not asked for
    "routed_dp_rank": (0,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
}

# Shared by /v1/chat/completions and /v1/completions.
OPENAI: Neutral = {
    **NEUTRAL_ONLY,
    **COMMON,
    "prompt_cache_retention": ("in_memory",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}

CHAT: Neutral = {
    **OPENAI,
    "function_call": ("none",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "suffix": (),
    "thinking": ({"type": "disabled"},),
    "verbosity": ("medium",),
}

STREAM_OPTIONS: Neutral = {"include_obfuscation": ()}

GENERATE: Neutral = {
    **COMMON,
    "modalities": (["text"],),
}

TOKENIZE: Neutral = {
    **dict.fromkeys(("chat_template", "media_io_kwargs", "mm_processor_kwargs"), ()),
    "reasoning_effort": ("none",),
}

LABELS: Mapping[str, type] = {
    "conversation_id": str,
    "external_trace_header": dict,
    "include_reasoning": bool,
    "log_metrics": bool,
    "metadata": dict,
    "model": str,
    "no_logs": bool,
    "parallel_tool_calls": bool,
    "prompt_cache_key": str,
    "routing_key": str,
    "safety_identifier": str,
    "separate_reasoning": bool,
    "session_id": str,
    "stream_reasoning": bool,
    "user": str,
}


def check(
    extra: Mapping[str, Any],
    neutral: Neutral,
    known: Iterable[str],
    places: names.Places | None = None,
) -> None:
    """Raises a `RequestError` for the first field that asks for what is not served."""
    neutral_values.check(extra, neutral, known, LABELS, places)
