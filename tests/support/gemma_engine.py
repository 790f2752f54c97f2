"""Engines of a tiny DiffusionGemma, and requests with different options of its rule."""

from support.tiny_engine import make_engine

RULES = [
    {"max_denoising_steps": 5},
    {"max_denoising_steps": 12, "confidence_threshold": 1.3, "stability_threshold": 0},
    {"max_denoising_steps": 4, "entropy_bound": 6.0, "t_max": 0.3, "t_min": 0.1},
    {"max_denoising_steps": 10, "entropy_bound": 30.0, "t_max": 0.05, "t_min": 0.02},
]


def make(model, **options):
    defaults = {
        "model_path": str(model),
        "dllm_algorithm": "Gemma4Renoise",
        "dllm_algorithm_config": None,
        "max_running_requests": 2,
        "context_length": 96,
        "chunked_prefill_size": 16,
        "page_size": 8,
        "max_total_tokens": 96 + 16,  # less than two long rows need
    }
    return make_engine(**defaults | options)


def params_of(count):
    found = []
    for i in range(count):
        one = {"max_new_tokens": 5 + 6 * (i % 4), "seed": 1000 + i, "dllm": RULES[i % len(RULES)]}
        one |= {"ignore_eos": i % 3 == 0, "return_logprob": True, "return_step_map": True}
        if i % 5 == 4:
            one |= {"temperature": 0}
        found.append(one)
    return found
