"""What people write for what is served here: the hint in an error about an unknown option.

Names come from other servers (SGLang, vLLM, Ollama, llama.cpp, OpenAI), from Hugging Face's
`generate`, diffusers, A1111, ComfyUI and stable-diffusion.cpp, and from the scripts of LLaDA,
Dream, SDAR and Fast-dLLM. A row gives the names and what they are called here. Routes differ in
what they serve, so a row may list several names; the first one that is served counts.

A name in no table gets the nearest served one, if one is near (`errors.nearest`). So a hint never
names an option that would be refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from jdllm import errors

# How an option is written elsewhere in a request -> the names that are served there; "{}" is the
# name: `{"dllm.{}": ("threshold", "steps")}`.
Places = Mapping[str, Collection[str]]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

LEAVE_OUT = "leave it out"
_STEPS = (
    "steps num_steps n_steps sampling_steps sample_steps inference_steps num_inference_steps "
    "diffusion_steps num_diffusion_steps num_denoising_steps denoise_steps denoising_steps "
    "max_denoising_steps ddim_steps num_sampling_steps n_timesteps num_timesteps"
)
_PROMPTS = "prompt prompts text texts input inputs query question"
_SEEDS = "random_seed sampling_seed manual_seed noise_seed rng_seed torch_seed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Names that mean the same. `served`: what it is called here; `otherwise`: without that."""

    names: str
    served: str = ""
    say: str = "write {}"
    otherwise: str = LEAVE_OUT


TEXT: tuple[Row, ...] = (
    Row(
        names="gen_length gen_len generation_length max_length max_len max_gen_length max_gen_len "
        "max_gen_toks max_gen_tokens max_generated_tokens max_generation_tokens "
        "max_tokens_to_sample max_completion_tokens max_output_tokens max_tokens max_new_tokens "
        "max_output_length maxTokens maxOutputTokens n_predict num_predict num_tokens output_len "
        "output_length new_tokens tokens_to_generate max_sequence_length",
        served="max_new_tokens max_tokens max_output_tokens num_predict",
    ),
    Row(
        names="min_length min_new_tokens min_tokens min_output_tokens minimum_tokens",
        served="min_new_tokens min_tokens",
    ),
    Row(names=_STEPS, served="steps"),
    Row(
        names="block_size block_len blocklength block_length gen_blocklength gen_block_length",
        served="block_length",
    ),
    Row(
        names="sub_block_size sub_block_length small_block_length mini_block_size",
        served="small_block_size",
    ),
    Row(
        names="conf_threshold prob_threshold probability_threshold unmask_threshold "
        "unmasking_threshold decoding_threshold dynamic_threshold parallel_threshold",
        served="threshold",
    ),
    Row(
        names="dllm_algorithm diffusion_algorithm decoding_algorithm decoding_method "
        "generation_method sampler sampler_name sampling_method scheduler unmasking_strategy",
        served="algorithm",
    ),
    Row(names="remask remasking_method remask_strategy", served="remasking"),
    Row(
        names="cfg guidance_scale guidance cfgScale cfg_weight true_cfg_scale "
        "unsupervised_cfg_scale",
        served="cfg_scale",
    ),
    Row(names="alg_temperature", served="alg_temp"),
    Row(names="dual_cache use_cache cache_type use_dual_cache", served="cache_mode"),
    Row(names="eos_early_stop", served="early_stop"),
    Row(
        names="num_return_sequences num_samples num_outputs num_completions n_samples "
        "candidate_count candidateCount num_choices",
        served="n",
    ),
    Row(
        names="batch_size",
        otherwise="requests are batched by the engine, and prompts may be a list; leave it out",
    ),
    Row(
        names="stop_sequences stop_sequence stop_strings stop_words stopSequences until",
        served="stop",
    ),
    Row(names="eos_token_id eos_token_ids stop_ids stop_tokens", served="stop_token_ids"),
    Row(names="temp sampling_temperature", served="temperature"),
    Row(names="do_sample", served="temperature", say="write {}: 0 draws nothing"),
    Row(names="top_k topk topK", served="top_k"),
    Row(names="top_p topp topP nucleus", served="top_p"),
    Row(names="min_p minp minP", served="min_p"),
    Row(
        names="typical_p tfs_z mirostat mirostat_mode top_a epsilon_cutoff eta_cutoff top_h "
        "top_n_sigma xtc_threshold xtc_probability dry_multiplier dynatemp_range",
        served="top_p",
        say="there is no such sampler; use {}",
    ),
    Row(
        names="repeat_penalty repetition_penalty rep_pen repetitionPenalty",
        served="repetition_penalty repeat_penalty",
    ),
    Row(names=f"seed {_SEEDS}", served="seed"),
    Row(names=_PROMPTS, served="messages prompt input text"),
    Row(
        names="system system_prompt system_message instructions preamble",
        served="system instructions",
        otherwise="put it before the prompt, or into a message with the role system",
    ),
    Row(
        names="messages chat_history",
        served="messages",
        otherwise="conversations are for /v1/chat/completions, offline for LLM.chat; leave it out",
    ),
    Row(
        names="top_logprobs",
        served="top_logprobs logprobs top_logprobs_num",
        otherwise="/v1/chat/completions serves log-probabilities; leave it out",
    ),
    Row(names="refusal", served="content"),
    Row(names="function_call", served="tool_calls"),
    Row(
        names="guided_json guided_regex guided_choice guided_grammar grammar json_schema regex "
        "ebnf structural_tag structured_outputs response_format response_schema responseSchema "
        "format schema json_mode",
        otherwise="answers follow no grammar or schema; leave it out",
    ),
    Row(
        names="num_beams beam_width beam_size use_beam_search num_beam_groups length_penalty "
        "diversity_penalty early_stopping",
        otherwise="there is no beam search; leave it out",
    ),
    Row(
        names="mask_id mask_token_id mask_token pad_token_id",
        otherwise="the checkpoint sets it; leave it out",
    ),
    Row(
        names="num_ctx n_ctx context_length max_model_len max_context_length",
        otherwise="the server's --context-length sets it; leave it out",
    ),
    Row(
        names="num_images num_images_per_prompt image_size width height size negative_prompt "
        "negative strength init_image n_images",
        otherwise="it is for images, and this model writes text; leave it out",
    ),
)

IMAGES: tuple[Row, ...] = (
    Row(names=_STEPS, served="num_inference_steps"),
    Row(
        names="num_images num_images_per_prompt num_outputs_per_prompt num_outputs num_samples "
        "num_return_sequences batch_size batch_count n_iter n n_images n_samples numImages "
        "number_of_images image_count",
        served="n num_images_per_prompt",
    ),
    Row(
        names="cfg cfg_scale guidance guidance_weight cfgScale txt_cfg distilled_guidance "
        "embedded_guidance embedded_cfg_scale scale",
        served="guidance_scale",
    ),
    Row(names="true_cfg true_guidance_scale real_cfg", served="true_cfg_scale"),
    Row(
        names="size sizes image_size img_size image_dimensions image_resolution resolution "
        "dimensions aspect_ratio aspectRatio",
        served="size",
        otherwise="write width and height",
    ),
    Row(names="w image_width img_width", served="width"),
    Row(names="h image_height img_height", served="height"),
    Row(
        names="negative negatives neg_prompt negative_text negativePrompt uncond "
        "unconditional_prompt negative_prompts",
        served="negative_prompt",
    ),
    Row(
        names="strength denoise denoising_strength image image_url input_image init_image "
        "init_images mask mask_image reference_images control_image ip_adapter_image image_prompt",
        otherwise="images are made of text alone; leave it out",
    ),
    Row(
        names="sampler sampler_name sampler_index sample_method sampling_method scheduler "
        "scheduler_name schedule solver sigmas timesteps flow_shift shift eta algorithm",
        otherwise="the pipeline's folder sets how it samples; leave it out",
    ),
    Row(
        names="lora loras lora_path lora_scale lora_weights cross_attention_kwargs",
        otherwise="LoRA is not supported; leave it out",
    ),
    Row(
        names="temperature top_p top_k max_tokens max_new_tokens gen_length repetition_penalty "
        "dllm threshold block_length block_size stop messages do_sample",
        otherwise="it is for text, and this model makes images; leave it out",
    ),
    Row(names=_SEEDS, served="seed"),
    Row(names="response_type return_format", served="response_format output_type"),
    Row(
        names="format image_format file_format save_format output_format response_format",
        served="output_format output_type",
    ),
    Row(names="compression jpeg_quality image_quality", served="output_compression"),
    Row(names=f"{_PROMPTS} caption description positive positive_prompt", served="prompt prompts"),
    Row(
        names="max_length max_prompt_length max_text_length max_text_tokens",
        served="max_sequence_length",
    ),
)


def _by_name(rows: tuple[Row, ...]) -> dict[str, Row]:
    found = [(name, row) for row in rows for name in row.names.split()]
    assert len(found) == len(dict(found)), "a name is in two rows"
    return dict(found)


_TEXT, _IMAGES = _by_name(TEXT), _by_name(IMAGES)


def hint(name: str, known: Collection[str], places: Places | None = None) -> str:
    """Returns what to write instead of an unknown name, or "".

    `known` are the names that are served beside it, `places` those that are served elsewhere.
    """
    found = served(name, known, places) or _otherwise(name, known)
    return errors.nearest(name, known) if found is None else f"; {found}"


def instead(name: str, known: Collection[str], places: Places | None = None) -> str:
    """Returns what to do instead of giving a name that is known and refused."""
    return served(name, known, places) or _otherwise(name, known) or LEAVE_OUT


def served(name: str, known: Collection[str], places: Places | None = None) -> str | None:
    """Returns what to write instead, None if nothing like it is served."""
    row = _row(name, known)
    for candidate in (name, *(row.served.split() if row else ())):
        where = _written(candidate, known, places or {})
        if where is not None and where != name:
            return (row.say if row and candidate != name else "write {}").format(where)
    return None


def explained(
    places: Places | None = None,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Adds the hint to the error for an unknown keyword argument of the decorated function."""

    def decorated(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        known = [name for name in inspect.signature(call).parameters if name != "self"]

        @functools.wraps(call)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs:
                if name not in known:
                    raise TypeError(
                        f"{call.__qualname__}() has no argument {errors.quote(name)}"
                        f"{hint(name, known, places)}"
                    )
            return call(*args, **kwargs)

        return checked

    return decorated


def _row(name: str, known: Collection[str]) -> Row | None:
    return (_IMAGES if "num_inference_steps" in known else _TEXT).get(name)


def _otherwise(name: str, known: Collection[str]) -> str | None:
    row = _row(name, known)
    return None if row is None else row.otherwise


def _written(name: str, known: Collection[str], places: Places) -> str | None:
    """Returns how a served name is written, None for a name that is not served."""
    if name in known:
        return name
    return next((place.format(name) for place, names in places.items() if name in names), None)
