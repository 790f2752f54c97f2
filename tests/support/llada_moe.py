"""A tiny LLaDA-MoE with random weights, and its forward pass and greedy sampler in numpy.

Names, shapes and formulas are written out here from the published description, apart from the
engine's own table: embedding; per layer norm, q, k, v, a norm of each head of q and k, rotation of
its two halves, attention without a mask, norm, softmax over all experts of which the best ones
count by their share as it is; final norm and LM head.
"""

import json

import numpy as np
import safetensors.numpy

D, HEADS, KV_HEADS, HEAD, EXPERTS, BEST, WIDTH, LAYERS, VOCAB = 32, 4, 2, 8, 6, 2, 12, 2, 64
MASK, EOS, EPS, THETA = 60, 61, 1e-5, 50000.0

CONFIG = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "vocab_size": VOCAB,
    "hidden_size": D,
    "dense_intermediate_size": 48,
    "expert_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": None,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "moe_layer_freq": [1] * LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": BEST,
    "norm_topk_prob": None,
    "routed_scaling_factor": 1,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}


def random_tensors(seed=0):
    """Returns every tensor of the checkpoint by name, float32."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return (rng.normal(size=(rows, columns)) / columns**0.5).astype(np.float32)

    def norm(size):
        return rng.uniform(0.6, 1.4, size).astype(np.float32)

    found = {
        "model.embed_tokens.weight": rng.normal(size=(VOCAB, D)).astype(np.float32),
        "model.norm.weight": norm(D),
        "lm_head.weight": matrix(VOCAB, D) * 3,
    }
    for i in range(LAYERS):
        at, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        found |= {
            f"{at}.input_layernorm.weight": norm(D),
            f"{at}.post_attention_layernorm.weight": norm(D),
            f"{attention}.q_proj.weight": matrix(HEADS * HEAD, D),
            f"{attention}.k_proj.weight": matrix(KV_HEADS * HEAD, D),
            f"{attention}.v_proj.weight": matrix(KV_HEADS * HEAD, D),
            f"{attention}.o_proj.weight": matrix(D, HEADS * HEAD),
            f"{attention}.q_norm.weight": norm(HEAD),
            f"{attention}.k_norm.weight": norm(HEAD),
            f"{at}.mlp.gate.weight": matrix(EXPERTS, D) * 2,
        }
        for expert in range(EXPERTS):
            mlp = f"{at}.mlp.experts.{expert}"
            found |= {
                f"{mlp}.gate_proj.weight": matrix(WIDTH, D),
                f"{mlp}.up_proj.weight": matrix(WIDTH, D),
                f"{mlp}.down_proj.weight": matrix(D, WIDTH),
            }
    return found


def write(directory, tensors, **changes):
    """Writes a checkpoint and returns its folder."""
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def _norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def _softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _rotated(x):
    """Rotates [S, heads, HEAD] by its positions: dim j is paired with j + HEAD / 2."""
    angle = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attention(h, tensors, at):
    def heads(name, count):
        return (h @ tensors[f"{at}.{name}_proj.weight"].T).reshape(len(h), count, HEAD)

    q = _rotated(_norm(heads("q", HEADS), tensors[f"{at}.q_norm.weight"]))
    k = _rotated(_norm(heads("k", KV_HEADS), tensors[f"{at}.k_norm.weight"]))
    v, out = heads("v", KV_HEADS), np.zeros((len(h), HEADS, HEAD))
    for head in range(HEADS):
        mine = head // (HEADS // KV_HEADS)
        out[:, head] = _softmax(q[:, head] @ k[:, mine].T * HEAD**-0.5) @ v[:, mine]
    return out.reshape(len(h), -1) @ tensors[f"{at}.o_proj.weight"].T


def _experts(h, tensors, at):
    out, shares = np.zeros_like(h), _softmax(h @ tensors[f"{at}.gate.weight"].T)
    for token, share in enumerate(shares):
        for expert in np.argsort(-share, kind="stable")[:BEST]:
            gate, up, down = (
                tensors[f"{at}.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            x = gate @ h[token]
            out[token] += share[expert] * (down @ (x / (1 + np.exp(-x)) * (up @ h[token])))
    return out


def logits(ids, tensors):
    """Returns the logits [S, VOCAB] of one sequence, in float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = tensors["model.embed_tokens.weight"][np.asarray(ids)]
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        h = _norm(x, tensors[f"{at}.input_layernorm.weight"])
        x = x + _attention(h, tensors, f"{at}.self_attn")
        h = _norm(x, tensors[f"{at}.post_attention_layernorm.weight"])
        x = x + _experts(h, tensors, f"{at}.mlp")
    return _norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def generate(prompt, length, block, tensors):
    """Returns `length` tokens, one a step: the most probable masked one of the first block."""
    ids = np.array([*prompt, *[MASK] * length])
    masked = np.arange(len(ids)) >= len(prompt)
    while masked.any():
        z = logits(ids, tensors)
        prob = _softmax(z)
        z[:, MASK] = prob[:, MASK] = -np.inf
        first = (np.flatnonzero(masked)[0] - len(prompt)) // block
        begin = len(prompt) + first * block
        inside = masked & (np.arange(len(ids)) >= begin) & (np.arange(len(ids)) < begin + block)
        best = int(np.argmax(np.where(inside, prob.max(axis=1), -1)))
        ids[best], masked[best] = int(np.argmax(z[best])), False
    return ids[len(prompt) :].tolist()
