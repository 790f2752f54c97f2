"""The forwards of DiffusionGemma's rows, without an engine: encode contexts, denoise canvases."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jdllm.kv_cache import pool
from jdllm.kv_cache.pool import PoolConfig
from jdllm.models import loading
from jdllm.runner.config import StepConfig
from jdllm.runner.packed import PackedInputs
from jdllm.runner.uniform import forward
from jdllm.scheduler import sizes
from jdllm.scheduler.rows import uniform

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "diffusion_gemma"
CANVAS, VOCAB = 8, 256


def load(name):
    return np.load(GOLDEN / f"{name}.npy")


def write_tame_model(folder, *, num_layers=4):
    """Writes the golden model with self-conditioning of a hundredth of its strength.

    With random weights the golden's own multiplies a difference by eight in every step: after five
    steps rounding decides about tokens. Two layers are one of each kind.
    """
    tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
    tensors["model.decoder.self_conditioning.down_proj.weight"] *= 0.01
    gone = [f".layers.{i}." for i in range(num_layers, 4)]
    kept = {k: v for k, v in tensors.items() if not any(one in k for one in gone)}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = num_layers
    text["layer_types"] = text["layer_types"][:num_layers]
    text["per_layer_config"] = {
        i: own for i, own in text["per_layer_config"].items() if int(i) < num_layers
    }
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / "generation_config.json", folder)
    return folder


def weights_of_rank(text, tp):
    """Returns (numbers in the dtype of the model, numbers in float32) that a rank holds.

    `text` is the `text_config`. Of heads, experts and widths a rank has its share, but at least one
    kv head; of the vocabulary it has the whole embedding and its rows of the head.
    """
    D, V, E = text["hidden_size"], text["vocab_size"], text["num_experts"]
    dense, experts = text["intermediate_size"], text["moe_intermediate_size"]
    whole = V * D + D + D  # embedding, final norm, norm of self-conditioning
    split = 3 * dense * D + (V * D if tp > 1 else 0)  # self-conditioning, head
    exact, attention = 0, 0
    for heads, dim, values in heads_of_layers(text):
        whole += 7 * D + D + 2 + 2 * dim  # norms, scale of the router, scalars, norms of q and k
        exact += D * E + E
        split += 3 * dense * D + 3 * E * experts * D
        query = text["num_attention_heads"] * dim // tp
        attention += D * (2 * query + (1 + values) * max(heads // tp, 1) * dim)
    return whole + split // tp + attention, exact


def heads_of_layers(text):
    """Yields (kv heads, head dim, 1 if v is projected) of each layer."""
    for i, kind in enumerate(text["layer_types"]):
        is_full = kind == "full_attention"
        sizes = {
            "num_key_value_heads": text.get("num_global_key_value_heads") if is_full else None,
            "head_dim": text.get("global_head_dim") if is_full else None,
        }
        own = (text.get("per_layer_config") or {}).get(str(i), {})
        heads, dim = (own.get(key) or size or text[key] for key, size in sizes.items())
        yield heads, dim, 0 if is_full else 1


class GemmaRows:
    """Rows of a model over one pool; row r owns the pages from r * pages on."""

    def __init__(self, num_rows, *, folder=GOLDEN, context=64, page_size=8):
        self.loaded = loading.load(folder, show_progress=False)
        spec = self.loaded.spec
        self.pages = -(-(context + CANVAS) // page_size)
        self.config = StepConfig(
            spec=spec,
            pool=PoolConfig(
                num_pages=num_rows * self.pages,
                page_size=page_size,
                num_layers=spec.num_layers,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=str(self.loaded.params["norm.weight"].dtype),
                kv_heads_of_layers=spec.kv_heads_of_layers,
            ),
            context_length=context,
            num_slots=num_rows,
            algorithms=("Gemma4Renoise",),
        )
        self.pools = pool.create(self.config.pool)
        self.table = np.zeros((num_rows, self.config.pages_per_row), np.int32)
        self.table[:, : self.pages] = np.arange(num_rows * self.pages).reshape(num_rows, -1)
        self.context = np.zeros((num_rows,), np.int32)
        self.model = forward.model_of(self.loaded.graphdef, self.loaded.params)
        # The tests' own jit, so that shapes are compiled once.
        self._encode = jax.jit(
            lambda pools, inputs: forward.encode_step(
                self.loaded.graphdef, self.config, self.loaded.params, {"pools": pools}, inputs
            )
        )
        self._canvases = jax.jit(self._run_canvases)

    def encode(self, tokens):
        """Adds tokens to the contexts, a list for each row."""
        tile, num_rows = uniform.tile_of(CANVAS), len(tokens)
        packed, cu = [], [0]
        for row in tokens:
            width = sizes.in_units(len(row), tile)
            packed += [*row, *[0] * (width - len(row))]
            cu.append(cu[-1] + width)
        lengths = np.array([len(row) for row in tokens], np.int32)
        inputs = PackedInputs(
            tokens=np.array([*packed, *[0] * tile], np.int32),  # a tile of padding
            cu_q_lens=np.array(cu, np.int32),
            context_lens=self.context[:num_rows],
            kv_lens=np.where(lengths > 0, self.context[:num_rows] + lengths, 0).astype(np.int32),
            page_table=self.table[:num_rows],
        )
        memory, count = self._encode(self.pools, inputs)
        assert count == lengths.sum()
        self.pools = memory["pools"]
        self.context[:num_rows] += lengths

    def denoise(self, canvas, expected=None):
        """Returns the logits [R, L, V] of the canvases behind the contexts."""
        canvas = np.asarray(canvas, np.int32)
        if expected is None:
            expected = jnp.zeros((*canvas.shape, self.loaded.spec.hidden_size))
        logits, self.pools = self._canvases(self.pools, canvas, expected, self.context.copy())
        return logits

    def mix(self, logits):
        """Returns the mixture of embeddings that logits [R, L, V] expect."""
        shares = jax.nn.softmax(logits, axis=-1).reshape(-1, VOCAB)
        return self.model.mix(shares).reshape(*logits.shape[:2], -1)

    def _run_canvases(self, pools, canvas, expected, context):
        model = forward.model_of(self.loaded.graphdef, self.loaded.params)
        active = jnp.ones((len(canvas),), bool)
        hidden, pools = forward.forward_canvases(
            self.config, model, pools, canvas, expected, context, active, jnp.asarray(self.table)
        )
        logits = model.logits(hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*canvas.shape, VOCAB), pools
