"""Gemma4Renoise for one row in plain numpy, and whole requests without engine and batches."""

import jax.numpy as jnp
import numpy as np
from support.gemma_rows import CANVAS, VOCAB, GemmaRows

import pallas_kernels
from jdllm.algorithms import lookup
from jdllm.runner.uniform import noise


class Oracle:
    """One row as the reference has it: steps count down, entropies are sorted."""

    def __init__(self, options):
        self.options = lookup.TABLE["Gemma4Renoise"].defaults | options
        self.remaining = self.options["max_denoising_steps"]
        self.history = []

    def temperature(self):
        o = self.options
        share = self.remaining / o["max_denoising_steps"]
        return o["t_min"] + (o["t_max"] - o["t_min"]) * share

    def step(self, logits, drawn, noise):
        """Returns (next canvas, output or None), from logits [L, V] in float64."""
        o, scaled = self.options, logits / self.temperature()
        high = scaled.max(axis=1, keepdims=True)
        share = np.exp(scaled - high) / np.exp(scaled - high).sum(axis=1, keepdims=True)
        entropy = -(share * np.log(np.maximum(share, 1e-300))).sum(axis=1)
        canvas, total = list(noise), 0.0
        for place in sorted(range(len(logits)), key=lambda i: entropy[i]):  # a stable sort
            if total <= o["entropy_bound"]:
                canvas[place] = drawn[place]
            total += entropy[place]
        best = logits.argmax(axis=1).tolist()
        wanted = o["stability_threshold"]
        last = self.history[len(self.history) - wanted :] if wanted else []
        is_stable = len(last) == wanted and all(one == best for one in last)
        self.history.append(best)
        self.remaining -= 1
        is_done = is_stable and entropy.mean() < o["confidence_threshold"]
        return canvas, (best if is_done or self.remaining == 0 else None)


class Reference:
    """Writes requests one by one; random numbers are those that the engine must use."""

    def __init__(self, folder):
        self.rows = GemmaRows(1, folder=folder, context=96, page_size=32)

    def write(self, prompt, options, *, seed, max_new_tokens, ends=(), is_greedy=False):
        """Returns (tokens, forwards, log-probabilities, steps) of a request."""
        rows, words = self.rows, jnp.asarray([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32)
        rows.context[:] = 0
        self._encode(prompt)
        out, logprobs, since, forwards = [], [], [], 0
        while True:
            place = int(rows.context[0]) + jnp.arange(CANVAS, dtype=jnp.int32)[None]
            oracle, expected, output, step = Oracle(options), None, None, 0
            canvas = noise.uniform_tokens(words, place, jnp.asarray([0]), VOCAB)
            while output is None:
                logits = np.asarray(rows.denoise(canvas, expected))[0]
                tempered = jnp.asarray(logits / np.float32(oracle.temperature()))
                keys = noise.draw_keys(words, place, jnp.asarray([step]))[0]
                drawn = pallas_kernels.logits_stats(
                    tempered, draw_keys=keys, temperature=jnp.ones((CANVAS,))
                ).drawn_id
                if is_greedy:
                    drawn = logits.argmax(axis=1)
                step += 1
                fresh = noise.uniform_tokens(words, place, jnp.asarray([step]), VOCAB)[0]
                canvas, output = oracle.step(
                    logits.astype(np.float64), np.asarray(drawn), np.asarray(fresh)
                )
                canvas, expected = np.asarray([canvas]), rows.mix(tempered[None])
            forwards += step
            shifted = logits - logits.max(axis=1, keepdims=True)
            plain = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            for i, token in enumerate(output):
                past = [one[i] == token for one in oracle.history]
                out.append(token)
                logprobs.append(plain[i, token])
                since.append(max((k + 1 for k, same in enumerate(past) if not same), default=0) + 1)
                if token in ends or len(out) == max_new_tokens:
                    return out, forwards, logprobs, since
            self._encode(output)

    def _encode(self, tokens):
        # Pieces of one size, so that one program is enough.
        for i in range(0, len(tokens), CANVAS):
            piece = list(tokens[i : i + CANVAS])
            self.rows.encode([piece])
