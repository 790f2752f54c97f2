"""The tiny Nemotron served: random requests in its modes, and which oracle answers them."""

from support import nemotron_oracle
from support.tiny_engine import make_engine

BLOCK, MASK = 8, 90
AR, SPEC, DIFFUSION = "Autoregressive", "LinearSpec", "MaskedDiffusion"
POLICIES = ("confidence_threshold", "low_confidence", "leftmost")


def make(folder, algorithms, **options):
    """Returns an engine over a folder."""
    defaults = {
        "model_path": str(folder),
        "dllm_algorithm": algorithms,
        "dllm_algorithm_config": {"block_size": BLOCK},
        "max_running_requests": 2,
        "num_continuous_decode_steps": 8,
    }
    return make_engine(**defaults | options)


def random_case(rng, i):
    """Returns (a prompt, options of a request, what the oracle says to them)."""
    prompt = rng.integers(0, MASK, int(rng.integers(1, 50))).tolist()
    wanted, ends = int(rng.integers(1, 30)), rng.integers(0, MASK, 3).tolist()
    params = {"max_new_tokens": wanted, "ignore_eos": True, "stop_token_ids": ends}
    match i % 4:
        case 0:
            policy = POLICIES[i // 4 % 3]
            settings = {"seed_first": bool(rng.integers(2))}
            steps = int(rng.integers(2, 10))
            dllm = {"selection_policy": policy, "max_denoising_steps": steps} | settings
            asked = settings | {"policy": policy, "steps": steps}
            if policy == POLICIES[0]:
                dllm["threshold"] = asked["threshold"] = float(rng.choice([0.1, 0.3, 0.8]))
            answer = nemotron_oracle.masked_diffusion, asked | {"block": BLOCK}
        case 1:
            dllm, answer = {"algorithm": AR}, (nemotron_oracle.autoregressive, {})
        case _:
            settings = {
                "block_length": int(rng.integers(1, BLOCK + 1)),
                "threshold": float(rng.choice([0.0, 0.2])),
            }
            dllm = {"algorithm": SPEC} | settings
            answer = nemotron_oracle.linear_spec, settings
    return prompt, params | {"dllm": dllm}, (answer[0], answer[1] | {"ends": ends})


def sampled(i, **dllm):
    return {
        "max_new_tokens": 40, "ignore_eos": True, "temperature": (0.5, 1.0)[i % 2], "seed": i,
        "top_p": 0.9, "return_logprob": True, "dllm": dllm,
    }  # fmt: skip
