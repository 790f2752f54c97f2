"""Fields that other servers know and this one does not serve.

A field of these tables is accepted with a neutral value (one that asks for nothing) and refused
by name with any other value. Nothing is dropped silently. `ANY_OF_TYPE` lists labels and hints
that change no output, whatever their value is; any value of the right type is accepted.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from jdllm import errors, sampling_params

Neutral = Mapping[str, tuple[Any, ...]]

_OFF = (None, False)

# Shared by /v1/chat/completions and /v1/completions.
OPENAI: Neutral = {
    **sampling_params.NEUTRAL_ONLY,
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "store": _OFF,
    "service_tier": (None, "auto", "default"),
    "echo": _OFF,
    "priority": (None, 0),
    "lora_path": (None, ""),
    "session_params": (None, {}),
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_meta_info": _OFF,
    "return_routed_experts": _OFF,
    "include_stop_str_in_output": _OFF,
    "input_ids": (None,),
    "custom_logit_processor": (None,),
    "prompt_cache_retention": (None, "in_memory"),
}

CHAT: Neutral = {
    **OPENAI,
    "suffix": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "continue_final_message": _OFF,
    "add_generation_prompt": (None, True),
}

MESSAGE: Neutral = {
    "name": (None,),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "function_call": (None,),
    "reasoning_content": (None, ""),
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
}

STREAM_OPTIONS: Neutral = {"include_obfuscation": _OFF}

GENERATE: Neutral = {
    "logprob_start_len": (None, -1),
    "token_ids_logprob": (None, []),
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "modalities": (None, ["text"]),
    "input_embeds": (None,),
    "lora_path": (None, ""),
    "session_params": (None, {}),
    "session_id": (None,),
    "custom_logit_processor": (None,),
    "background": _OFF,
    "priority": (None, 0),
    "extra_key": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "data_parallel_rank": (None, 0),
    "incremental_streaming_output": _OFF,
}


ANY_OF_TYPE: Mapping[str, type] = {
    "user": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "conversation_id": str,
    "metadata": dict,
    "parallel_tool_calls": bool,
    "separate_reasoning": bool,
    "stream_reasoning": bool,
    "log_metrics": bool,
    "no_logs": bool,
}


def check(extra: Mapping[str, Any], neutral: Neutral, known: Iterable[str]) -> None:
    """Raises a `RequestError` for the first field that is unknown or has no neutral value."""
    for name, value in extra.items():
        if name in neutral:
            if not any(value == v and type(value) is type(v) for v in neutral[name]):
                raise errors.RequestError(
                    f"{name}={reprlib.repr(value)} is not supported by this engine; leave it out",
                    param=name,
                )
        elif name in ANY_OF_TYPE:
            if value is not None and not isinstance(value, ANY_OF_TYPE[name]):
                raise errors.RequestError(
                    f"{name} must be a {ANY_OF_TYPE[name].__name__}, got {reprlib.repr(value)}",
                    param=name,
                )
        else:
            hint = errors.nearest(name, {*known, *neutral, *ANY_OF_TYPE})
            raise errors.RequestError(f"unknown parameter {name!r}{hint}", param=name)
