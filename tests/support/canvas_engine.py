"""Engines over the tiny reference checkpoints of full-attention models, and slow oracles of them.

An `Ask` (`canvas_asks.py`) is one request, for the engine and for the oracles alike. The oracles
run one row in plain Python over a forward in numpy: `decoded` with the windows that an algorithm
plans, every K,V and hidden state kept from the forward that last had its position; `one_by_one`
by hand, the surest token first, without any of the project's code.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np
import safetensors.numpy
import tokenizers
from support import canvas_rows
from support.canvas_asks import CONTEXT, MASK, VOCAB
from tokenizers import decoders, models, pre_tokenizers

import jdllm
from jdllm.scheduler.rows import canvas

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"
ALGORITHMS = {
    "llada": "FullAttnMultiBlock,EntropyThreshold,LLaDA,FastDLLM",
    "dream": "FullAttnMultiBlock,EntropyThreshold,Dream,FastDLLM",
}
ROWS = {"llada": 4, "dream": 2}
END_OF_TEXT = 241  # of both config.json
SHORT_CANVAS = {"llada": 24, "dream": 0}  # 0: one launch for any length
# How far float32 on the device is from float64 in numpy; logits are of the order of 5.
ATOL = 5e-4
FIRST_LETTER = 0x4E00  # of token 0; each token is a letter of its own


_OPEN: dict[str, jdllm.Engine] = {}  # the shared engines, by family
serves_logits = True  # whether they have launches for requests that edit their logits


def close_shared():
    """Closes the shared engines; who asks again gets new ones."""
    while _OPEN:
        _OPEN.popitem()[1].shutdown()


def shared(family):
    """Returns the family's engine, one for all tests: compiling it is most of what they cost.

    Its pool is large, so that a copy of it would show.
    """
    if family not in _OPEN:
        with tempfile.TemporaryDirectory() as directory:
            write_tokenizer(pathlib.Path(directory))
            _OPEN[family] = make(
                family,
                short_row_tokens=SHORT_CANVAS[family],
                with_logits=serves_logits,
                tokenizer_path=directory,
                skip_tokenizer_init=False,
                max_total_tokens=1 << 15,
            )
    return _OPEN[family]


def make(family, whole_tokens=(32, CONTEXT), short_row_tokens=0, with_logits=False, **options):
    """Returns an engine; it also has launches of a whole canvas, as on a GPU.

    Only `with_logits` serves requests that need their logits: their launches take time to compile.
    """
    defaults = {
        "model_path": str(GOLDENS / family),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "dllm_algorithm": ALGORITHMS[family],
        "max_running_requests": ROWS[family],
        "context_length": CONTEXT,
        "page_size": 16,
        "max_total_tokens": 4 * CONTEXT,
    }
    # The default matmul precision is read when steps are traced, in Engine().

    def rows(cls, config):
        buckets = canvas.CanvasBuckets.default(
            config.max_running_requests,
            config.prefill_token_budget,
            config.context_length,
            short_row_tokens=short_row_tokens,
            whole_tokens=whole_tokens,
        )
        return cls(config, buckets)

    sized = mock.patch.object(canvas.CanvasRows, "build", classmethod(rows))
    no_sizes = mock.patch.object(canvas.CanvasBuckets, "logit_rows", ())
    more = contextlib.nullcontext() if with_logits else no_sizes
    with sized, more, jax.default_matmul_precision("highest"):
        return jdllm.Engine(**defaults | options)


def write_tokenizer(directory, vocab_size=VOCAB):
    vocabulary = {chr(FIRST_LETTER + i): i for i in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=chr(FIRST_LETTER)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))


def text(ids):
    return "".join(chr(FIRST_LETTER + i) for i in ids)


def prompt(family):
    return np.load(GOLDENS / family / "prompt.npy")[0].tolist()


@contextlib.contextmanager
def launches(engine, *, steps, overlaps):
    """Sets how many steps a launch has, and whether launches overlap."""
    core = engine._built.core
    rows = core.scheduler.rows
    before = (rows._decode_steps, core._overlaps)

    def put(values):
        rows._decode_steps, core._overlaps = values

    engine._loop.call(lambda: put((steps, overlaps))).result()
    try:
        yield
    finally:
        engine._loop.call(lambda: put(before)).result()


def generate(engine, asks):
    """Returns the engine's answers to all of them at once."""
    return engine.generate(
        input_ids=[ask.prompt for ask in asks],
        sampling_params=[ask.params for ask in asks],
        suffix=[list(ask.suffix) for ask in asks],
        given=[ask.given for ask in asks],
    )


def alone(engine, asks):
    return [generate(engine, [ask])[0] for ask in asks]


def told(results):
    """Returns all that the answers say and that is exact."""
    return [
        (r["output_ids"], r["meta_info"]["finish_reason"], r["meta_info"]["nfe"],
         r["meta_info"]["step_map"])
        for r in results
    ]  # fmt: skip


def logprobs(result):
    return np.array([entry[0] for entry in result["meta_info"]["output_token_logprobs"]])


class Model:
    """The forward of a family in float64: a window of positions over stored K,V."""

    def __init__(self, family):
        tensors = safetensors.numpy.load_file(GOLDENS / family / "model.safetensors")
        self._tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        hf = json.loads((GOLDENS / family / "config.json").read_text())
        self._eps, self._theta = hf["rms_norm_eps"], hf["rope_theta"]
        self._names = NAMES[family]
        self.num_layers = hf.get("n_layers") or hf["num_hidden_layers"]
        self._heads = hf.get("n_heads") or hf["num_attention_heads"]
        self._kv_heads = hf.get("n_kv_heads") or hf["num_key_value_heads"]
        self.is_shifted = family == "dream"

    def empty_cache(self, length):
        shape = (self.num_layers, 2, length, self._kv_heads, 64 // self._heads)
        return np.full(shape, np.nan)  # what was never written must not be read

    def window(self, ids, low, high, cache):
        """Returns hidden states of [low, high) of `ids`, and overwrites their K,V in `cache`."""
        x = self._tensor("embed")[ids[low:high]]
        for i, (keys, values) in enumerate(cache):
            normed = self._norm(x, self._tensor("attn_norm", i))
            q, k, v = (self._project(normed, name, i) for name in ("q", "k", "v"))
            keys[low:high], values[low:high] = self._turn(k, low), v
            group = self._heads // self._kv_heads
            all_keys, all_values = (np.repeat(a, group, axis=1) for a in (keys, values))
            scores = np.einsum("tnh,snh->nts", self._turn(q, low), all_keys)
            weights = np.exp(log_softmax(scores / np.sqrt(q.shape[-1])))
            mixed = np.einsum("nts,snh->tnh", weights, all_values)
            x = x + mixed.reshape(high - low, -1) @ self._tensor("o", i).T
            normed = self._norm(x, self._tensor("mlp_norm", i))
            gate, up = (normed @ self._tensor(name, i).T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self._tensor("down", i).T
        return self._norm(x, self._tensor("norm"))

    def logits(self, hidden):
        return hidden @ self._tensor("head").T

    def aligned_logits(self, ids):
        """Returns logits [S, V] of a whole sequence; row p is the prediction for position p."""
        hidden = self.window(np.asarray(ids), 0, len(ids), self.empty_cache(len(ids)))
        if self.is_shifted:
            hidden = np.concatenate([hidden[:1], hidden[:-1]])
        return self.logits(hidden)

    def _tensor(self, name, layer=None):
        return self._tensors[self._names[name].format(layer)]

    def _project(self, x, name, layer):
        path = self._names[name].format(layer)
        y = x @ self._tensors[path].T + self._tensors.get(path.replace("weight", "bias"), 0.0)
        return y.reshape(len(x), -1, 64 // self._heads)

    def _norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._eps) * weight

    def _turn(self, x, low):
        """Rotates [T, heads, H] by position, the first being `low`."""
        half = x.shape[-1] // 2
        speeds = self._theta ** (-np.arange(half) / half)
        angles = (low + np.arange(len(x)))[:, None, None] * speeds
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


NAMES = {
    "llada": {
        "embed": "model.transformer.wte.weight",
        "norm": "model.transformer.ln_f.weight",
        "head": "model.transformer.ff_out.weight",
    }
    | {
        name: "model.transformer.blocks.{}." + path + ".weight"
        for name, path in {
            "attn_norm": "attn_norm", "mlp_norm": "ff_norm", "q": "q_proj", "k": "k_proj",
            "v": "v_proj", "o": "attn_out", "gate": "ff_proj", "up": "up_proj", "down": "ff_out",
        }.items()
    },
    "dream": {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    | {
        name: "model.layers.{}." + path + ".weight"
        for name, path in {
            "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
            "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
            "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        }.items()
    },
}  # fmt: skip


@functools.cache
def model(family):
    return Model(family)


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def statistics(logits):
    """Returns the fields of a proposal, of logits [S, V]; the mask is never proposed."""
    logprob = log_softmax(logits)
    p = np.exp(logprob)
    allowed = p.copy()
    allowed[:, MASK] = -1
    two = np.sort(allowed, axis=1)[:, -2:]
    return {
        "tokens": allowed.argmax(axis=1),
        "prob": two[:, 1],
        "entropy": -(p * logprob).sum(axis=1),
        "margin": two[:, 1] - two[:, 0],
    }


@dataclasses.dataclass
class Decoded:
    """What a row writes: its output, and what it took to write it.

    `logprobs` has the log-probabilities of all tokens of every position in the step that wrote it.
    """

    output_ids: list
    nfe: int
    num_full: int
    num_forwarded: int
    logprobs: dict = dataclasses.field(default_factory=dict)


def decoded(family, ask, edit=None):
    """Returns what `ask` gives when it runs alone, forward after forward, greedily.

    `edit(logits, position, tokens)` changes the logits of a position before everything else; of the
    tokens of the canvas, those that are not written are None.
    """
    algorithm = ask.dllm["algorithm"]
    # Compiled once per algorithm: FastDLLM and others have one rule for both families.
    is_shifted = family == "dream" and algorithm == "FullAttnMultiBlock"
    plan, update = canvas_rows.compiled(algorithm, is_shifted)
    options = {name: value for name, value in ask.dllm.items() if name != "algorithm"}
    start, end, length = len(ask.prompt), ask.end, len(ask.canvas)
    ends = {"end_ids": ask.ends, "filler": END_OF_TEXT}
    row = canvas_rows.Row(text=ask.canvas, start=start, end=end, options=options, **ends)
    canvas = canvas_rows.make_canvas(algorithm, [row], CONTEXT, is_shifted=is_shifted)
    own = model(family)
    cache, hidden = own.empty_cache(length), np.full((length, 64), np.nan)
    done = Decoded(output_ids=[], nfe=0, num_full=0, num_forwarded=0)
    while True:
        planned, window = plan(canvas)
        seen, shown = canvas_rows.as_numpy(planned), canvas_rows.as_numpy(window)
        masked, tokens = seen.masked[0], seen.tokens[0]
        settled = next((p for p in range(start, end) if masked[p]), end)
        output = tokens[start:settled].tolist()
        ends = [place for place, token in enumerate(output) if token in ask.ends]
        if ends or settled >= start + ask.wanted or seen.is_done[0]:
            stop = min(ends[0] + 1 if ends else ask.wanted, ask.wanted)
            return dataclasses.replace(done, output_ids=output[:stop])
        low, high = int(shown.low[0]), int(shown.high[0])
        ids = np.where(masked, MASK, tokens)[:length]
        hidden[low:high] = own.window(ids, low, high, cache)
        sources = np.concatenate([hidden[:1], hidden[:-1]]) if own.is_shifted else hidden
        known = ~np.isnan(sources[:, 0])
        fields = {
            name: np.zeros((1, CONTEXT), values.dtype)
            for name, values in statistics(np.zeros((1, VOCAB))).items()
        }
        logits = own.logits(sources)
        if edit is not None:
            text = [None if masked[p] else int(tokens[p]) for p in range(length)]
            for p in np.flatnonzero(shown.wanted[0, :length]):
                logits[p] = edit(logits[p], p, text)
        for name, values in statistics(logits[known]).items():
            fields[name][0, :length][known] = values
        assert not (shown.wanted[0, :length] & ~known).any(), "a prediction from nowhere"
        written = update(planned, canvas_rows.made_proposal(seen, shown, fields))
        canvas = dataclasses.replace(written, step=written.step + 1)
        for p in np.flatnonzero(masked & ~np.asarray(written.masked[0])):
            done.logprobs[int(p) - start] = log_softmax(logits[p])
        done.nfe += 1
        done.num_full += int(shown.is_full[0])
        done.num_forwarded += high - low


def one_by_one(family, ask, *, cfg_scale=0.0):
    """Returns the output of writing the surest token of the first open block, one a forward."""
    own, canvas, start = model(family), ask.canvas, len(ask.prompt)
    length = ask.dllm.get("block_length", ask.end - start)
    while None in canvas:
        ids = [MASK if token is None else token for token in canvas]
        logits = own.aligned_logits(ids)
        if cfg_scale:
            blind = own.aligned_logits([MASK] * start + ids[start:])
            logits = blind + (cfg_scale + 1) * (logits - blind)
        block = (canvas.index(None) - start) // length
        inside = range(start + block * length, min(start + (block + 1) * length, ask.end))
        fields = statistics(logits)
        place = max((p for p in inside if canvas[p] is None), key=lambda p: fields["prob"][p])
        canvas[place] = int(fields["tokens"][place])
    return canvas[start : start + ask.wanted]
