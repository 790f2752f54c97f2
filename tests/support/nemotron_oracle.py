"""Nemotron-Labs-Diffusion in NumPy, one request at a time: its forward and its three modes.

Written from the published description alone, in float64 and without K,V: every forward computes the
whole sequence anew. Forwards are counted as the server counts them: those of blocks, those that
compute K,V of a block, and that of the prompt's last token.

Letters: T tokens of a call, D hidden size, N query heads, K kv heads, H head dim, V vocabulary.
"""

import json
import math

import numpy as np
import safetensors.numpy


class Model:
    """The forward pass over a whole sequence; with an `adapter` (a folder), drafts use it."""

    def __init__(self, folder, adapter=None):
        self.config = json.loads((folder / "config.json").read_text())
        stored = safetensors.numpy.load_file(folder / "model.safetensors")
        self.tensors = {name: array.astype(np.float64) for name, array in stored.items()}
        self.mask_id = self.config["mask_token_id"]
        self.head_dim = self.config["head_dim"]
        self.added = {} if adapter is None else added_weights(adapter)

    def norm(self, x, name):
        scale = np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"]
        return x / np.sqrt(scale) * self.tensors[f"{name}.weight"]

    def rates(self):
        """Returns the frequency of each pair of dims."""
        rope, H = self.config["rope_parameters"], self.head_dim
        theta, length = rope["rope_theta"], rope["original_max_position_embeddings"]

        def edge(turns):
            return H * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

        low = max(math.floor(edge(rope["beta_fast"])), 0)
        high = min(math.ceil(edge(rope["beta_slow"])), H - 1)
        found = []
        for j in range(H // 2):
            share = min(max((j - low) / (high - low), 0.0), 1.0)
            rate = theta ** (-2 * j / H)
            found.append(rate * (1 - share) + rate / rope["factor"] * share)
        return np.array(found)

    def rotated(self, x):
        half = self.head_dim // 2
        angle = (np.arange(len(x))[:, None] * self.rates())[:, None]
        low, high = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def forward(self, tokens, block=0, *, drafts=False):
        """Returns logits [T, V]; the last `block` tokens see all, others those before them.

        Where it `drafts`, the block uses the adapter.
        """
        rope, T = self.config["rope_parameters"], len(tokens)
        place = np.arange(T)
        visible = (place[:, None] >= place) | (place[:, None] >= T - block)
        periods = place // rope["original_max_position_embeddings"]
        scale = 1 + rope["llama_4_scaling_beta"] * np.log(1 + periods)
        N, K = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        x = self.tensors["encoder.embed_tokens.weight"][np.asarray(tokens)]
        for i in range(self.config["num_hidden_layers"]):
            name = f"encoder.layers.{i}"
            h = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                (h @ self.tensors[f"{name}.self_attn.{one}_proj.weight"].T).reshape(
                    T, heads, self.head_dim
                )
                for one, heads in (("q", N), ("k", K), ("v", K))
            )
            q = self.rotated(q) * scale[:, None, None]
            k, v = (np.repeat(one, N // K, axis=1) for one in (self.rotated(k), v))
            scores = np.einsum("tnh,snh->nts", q, k) / math.sqrt(self.head_dim)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out = np.einsum("nts,snh->tnh", weights, v).reshape(T, -1)
            x = x + out @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
            added = self.added.get(f"{name}.self_attn.o_proj")
            if drafts and added is not None:
                x[T - block :] += out[T - block :] @ added.T
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate = h @ self.tensors[f"{name}.mlp.gate_proj.weight"].T
            up = h @ self.tensors[f"{name}.mlp.up_proj.weight"].T
            down = self.tensors[f"{name}.mlp.down_proj.weight"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ down.T
        return self.norm(x, "encoder.norm") @ self.tensors["diffusion_head.weight"].T

    def best(self, row):
        """Returns the most probable token but the mask, and its probability."""
        prob = np.exp(row - row.max())
        prob /= prob.sum()
        token = int(np.argmax(np.where(np.arange(len(row)) == self.mask_id, -1.0, prob)))
        return token, prob[token]


def added_weights(folder):
    """Returns what a stored adapter adds to weights, by the path of the module."""
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    found, end = {}, ".lora_A.weight"
    for name, down in stored.items():
        if name.endswith(end):
            module = name.removesuffix(end).removeprefix("base_model.model.")
            up = stored[name.replace("lora_A", "lora_B")].astype(np.float64)
            rank = config.get("rank_pattern", {}).get(module, config["r"])
            alpha = config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
            assert down.shape[0] == up.shape[1] == rank
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            found[module] = scale * (up @ down.astype(np.float64))
    return found


def _length(output, max_new, ends):
    """Returns how many tokens of an output belong to it, None if it goes on."""
    for length in range(1, len(output) + 1):
        if output[length - 1] in ends or length == max_new:
            return length
    return None


def autoregressive(model, prompt, max_new, ends=()):
    """Returns (output ids, forwards)."""
    output = []
    while _length(output, max_new, ends) is None:
        output.append(model.best(model.forward([*prompt, *output])[-1])[0])
    return output, len(output)


def linear_spec(model, prompt, max_new, *, block_length, threshold=0.0, ends=()):
    """Returns (output ids, forwards)."""
    output, nfe = [model.best(model.forward(prompt)[-1])[0]], 1
    while (length := _length(output, max_new, ends)) is None:
        before = [*prompt, *output[:-1]]
        block = [output[-1]] + [model.mask_id] * (block_length - 1)
        masked = [False] + [True] * (block_length - 1)
        while any(masked):
            nfe += 1
            found = _found(model, before, block, masked, drafts=True)
            top = max(found, key=lambda i: (found[i][1], -i))
            for i, (token, prob) in found.items():
                if prob >= threshold or i == top:
                    block[i], masked[i] = token, False
        nfe += 1
        rows = model.forward([*before, *block])[-block_length:]
        for i, row in enumerate(rows):
            output.append(model.best(row)[0])
            if i + 1 == block_length or block[i + 1] != output[-1]:
                break
    return output[:length], nfe


def _found(model, before, block, masked, *, drafts=False):
    rows = model.forward([*before, *block], len(block), drafts=drafts)[-len(block) :]
    return {i: model.best(row) for i, row in enumerate(rows) if masked[i]}


def masked_diffusion(
    model, prompt, max_new, *, block, policy, threshold=None, steps=None, seed_first=False, ends=()
):
    """Returns (output ids, forwards); `policy` is a selection_policy."""
    ids, nfe, steps = list(prompt), 0, min(steps or block, block)
    while True:
        nfe += 1
        written, masked = [model.mask_id] * block, [True] * block
        if seed_first:
            written[0], masked[0] = model.best(model.forward(ids)[-1])[0], False
        for step in range(block + 1):
            known = masked.index(True) if any(masked) else block
            output = [*ids, *written[:known]][len(prompt) :]
            length = _length(output, max_new, ends)
            if length is not None:
                return output[:length], nfe
            if known == block:
                break
            nfe += 1
            found = _found(model, ids, written, masked)
            order = sorted(found, key=lambda i: (-found[i][1], i))
            if policy == "confidence_threshold":
                chosen = [i for i in found if found[i][1] >= threshold or i == order[0]]
            else:
                order = sorted(found) if policy == "leftmost" else order
                chosen = order[: -(-len(found) // max(steps - step, 1))]
            for i in found if step >= steps - 1 else chosen:
                written[i], masked[i] = found[i][0], False
        ids += written
