"""Fast-dLLM v2 in NumPy, one request at a time: Qwen2's forward and the model's own decoding.

Written from the published description alone, in float64. K,V of finished blocks are a list that
grows; K,V of the block in flight are another list, which a forward of a sub-block changes in part.

Letters: T tokens of a call, D hidden size, N query heads, K kv heads, H head dim, V vocabulary.
"""

import json

import numpy as np
import safetensors.numpy


class Model:
    """The forward pass over K,V that the caller keeps: for each layer [length, K, H] twice."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        stored = safetensors.numpy.load_file(folder / "model.safetensors")
        self.tensors = {name: array.astype(np.float64) for name, array in stored.items()}
        self.block = self.config["bd_size"]
        self.mask_id = self.config["mask_token_id"]
        self.head_dim = self.config["hidden_size"] // self.config["num_attention_heads"]
        self.layers = range(self.config["num_hidden_layers"])

    def no_kv(self):
        empty = np.zeros((0, self.config["num_key_value_heads"], self.head_dim))
        return [(empty, empty) for _ in self.layers]

    def norm(self, x, name):
        scale = np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"]
        return x / np.sqrt(scale) * self.tensors[f"{name}.weight"]

    def project(self, x, name, heads, positions=None):
        """Returns [T, heads, H], rotated if the positions are given."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        out = (x @ weight.T + bias).reshape(len(x), heads, self.head_dim)
        if positions is None:
            return out
        half = self.head_dim // 2
        rate = self.config["rope_theta"] ** (-np.arange(half) / half)
        angle = (positions[:, None] * rate)[:, None]
        low, high = out[..., :half], out[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def forward(self, tokens, start, kv, at=None):
        """Returns (logits [T, V], K,V of all layers) of tokens at the positions from `start` on.

        Their K,V follow those of `kv`, or take the places from `at` on. A token sees the keys of
        its own block and of all before it.
        """
        positions = start + np.arange(len(tokens))
        x, written = self.tensors["model.embed_tokens.weight"][np.asarray(tokens)], []
        for i in self.layers:
            name = f"model.layers.{i}"
            h = self.norm(x, f"{name}.input_layernorm")
            heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
            q = self.project(h, f"{name}.self_attn.q_proj", heads[0], positions)
            k = self.project(h, f"{name}.self_attn.k_proj", heads[1], positions)
            v = self.project(h, f"{name}.self_attn.v_proj", heads[1])
            place = len(kv[i][0]) if at is None else at
            k, v = (
                np.concatenate([old[:place], new, old[place + len(tokens) :]])
                for old, new in zip(kv[i], (k, v), strict=True)
            )
            written.append((k, v))
            k, v = (np.repeat(one, heads[0] // heads[1], axis=1) for one in (k, v))
            scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(self.head_dim)
            visible = positions[:, None] // self.block >= np.arange(len(k)) // self.block
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out = np.einsum("nts,snh->tnh", weights, v).reshape(len(x), -1)
            x = x + out @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate = h @ self.tensors[f"{name}.mlp.gate_proj.weight"].T
            up = h @ self.tensors[f"{name}.mlp.up_proj.weight"].T
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * up) @ self.tensors[f"{name}.mlp.down_proj.weight"].T
            )
        head = self.tensors["lm_head.weight"]
        return self.norm(x, "model.norm") @ head.T, written

    def best(self, row):
        """Returns the most probable token but the mask, and its probability."""
        prob = np.exp(row - row.max())
        prob /= prob.sum()
        token = int(np.argmax(np.where(np.arange(len(row)) == self.mask_id, -1.0, prob)))
        return token, prob[token]


def generate(model, prompt, max_new, *, threshold, small_block_size, use_block_cache, ends=()):
    """Returns (output ids, forwards of blocks in flight, of these forwards of sub-blocks).

    The forward that writes K,V of a block counts, and that of the prompt's last block if the
    prompt has no other tokens after it.
    """
    L, ids, nfe, small = model.block, list(prompt), 0, 0

    def length_of_output(known):
        """How many of the known leading tokens belong to the output once it has ended."""
        output = known[len(prompt) :]
        for length in range(1, len(output) + 1):
            if output[length - 1] in ends or length == max_new:
                return length
        return None

    kv = model.no_kv()
    whole = len(ids) // L * L
    if whole:
        logits, kv = model.forward(ids[:whole], 0, kv)
        if whole == len(ids):
            nfe += 1
            ids.append(model.best(logits[-1])[0])
    while True:
        start = len(kv[0][0])
        tokens = np.array((ids[start:] + [model.mask_id] * L)[:L])
        masked = start + np.arange(L) >= len(ids)
        block_kv = None
        while True:
            known = int(np.argmax(masked)) if masked.any() else L
            length = length_of_output([*ids[:start], *tokens[:known].tolist()])
            if length is not None:
                shown = [*ids[:start], *tokens.tolist()][len(prompt) :]
                return shown[:length], nfe, small
            if known == L:
                break
            first = known // small_block_size * small_block_size
            last = min(first + small_block_size, L)
            nfe += 1
            if use_block_cache and block_kv is not None and not masked[first]:
                small += 1
                logits, block_kv = model.forward(
                    tokens[first:last], start + first, block_kv, at=start + first
                )
                logits = np.concatenate([np.full((first, logits.shape[1]), np.nan), logits])
            else:
                logits, block_kv = model.forward(tokens, start, kv)
            found = {i: model.best(logits[i - 1]) for i in range(first, last) if masked[i]}
            sure = [i for i, (_, prob) in found.items() if prob > threshold]
            for i in sure or [max(found, key=lambda i: (found[i][1], -i))]:
                tokens[i], masked[i] = found[i][0], False
        nfe += 1
        logits, kv = model.forward(tokens, start, kv)
        ids = [*ids[:start], *tokens.tolist(), model.best(logits[-1])[0]]
