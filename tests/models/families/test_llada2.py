"""LLaDA2 against the stored outputs of the reference implementation (float32).

`llada22` routes whole blocks (LLaDA2.2); `llada2` limits the groups of a token (2.0 and 2.1).
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import marks

from jdllm.layers import attention
from jdllm.models import loading
from jdllm.runner import full_forward

GOLDENS = pathlib.Path(__file__).parents[2] / "data" / "goldens"
ATOL, RTOL = 2e-4, 1e-4  # the goldens' tolerance for float32 logits and hidden states
BLOCK = 8


VERSIONS = ("llada2", "llada22")
both_versions = pytest.mark.parametrize("version", VERSIONS)
one_version = pytest.mark.parametrize("version", marks.every(2, VERSIONS))  # by default


def golden(name, version="llada2"):
    return np.load(GOLDENS / version / f"{name}.npy")


@functools.cache
def model(implementation="auto", version="llada2"):
    return loading.load(
        GOLDENS / version, block_size=BLOCK, implementation=implementation, show_progress=False
    )


def dense_logits(loaded, params, ids, mask):
    batch, length = ids.shape
    module = loading.merge(loaded.graphdef, params)
    hidden, _ = module(
        jnp.asarray(ids).reshape(-1),
        jnp.tile(jnp.arange(length), batch),
        attend=attention.dense_attend(mask, batch),
        caches=[None] * loaded.spec.num_layers,
    )
    return module.logits(hidden).reshape(batch, length, -1)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=ATOL, rtol=RTOL)


@one_version
def test_full_model_logits_are_block_causal(version):
    assert attention.visibility_mask(24, BLOCK, "block_causal").tolist() == (
        golden("attn_mask", version).tolist()
    )
    full = full_forward.load_model(GOLDENS / version, block_size=BLOCK)
    inputs = golden("inputs", version)
    logits = full.logits(inputs.tolist())
    assert logits.dtype == jnp.float32
    close(logits, golden("logits", version))
    # The last block of a row that ends inside it is a block of its own, beside other rows too.
    cut = full.logits(inputs[:, :21])
    close(cut[:, :16], golden("logits", version)[:, :16])
    for row in (0, 1):
        close(cut[row], full.logits(inputs[row : row + 1, :21])[0])


@pytest.mark.parametrize("implementation", ["dense", "xla"])
@pytest.mark.parametrize(
    ("pattern", "expected"), [("block_causal", "logits"), ("full", "logits_bidirectional")]
)
def test_dense_forward_equals_reference(implementation, pattern, expected):
    loaded = model(implementation)
    mask = attention.visibility_mask(24, BLOCK, pattern)
    close(dense_logits(loaded, loaded.params, golden("inputs"), mask), golden(expected))


@both_versions
def test_hidden_states_and_routing_equal_reference_layer_by_layer(version):
    loaded = model(version=version)
    ids = golden("inputs", version)
    module = loading.merge(loaded.graphdef, loaded.params)
    positions = jnp.tile(jnp.arange(24), 2)
    attend = attention.dense_attend(golden("attn_mask", version), 2)
    angles = module.angles(positions)
    x = module.embed(jnp.asarray(ids).reshape(-1), positions)
    for i, layer in enumerate(module.layers):
        close(x.reshape(2, 24, -1), golden("hidden_states", version)[i])
        kind = angles[layer.attention.config.rope]
        out, _ = layer.attention(layer.input_layernorm(x), kind, attend=attend, cache=None)
        if i:
            h = layer.post_attention_layernorm(x + sum(out))
            stored = golden("router_logits", version)[i - 1]
            close(layer.mlp.router.logits(h).reshape(2, 24, -1), stored)
            chosen = layer.mlp.router(h)[0].reshape(2, 24, -1)
            reference = golden("router_topk_idx", version)[i - 1]
            np.testing.assert_array_equal(np.sort(chosen, -1), np.sort(reference, -1))
        x, pending, _ = layer(x, (), angles, attend=attend, cache=None)
        x = x + sum(pending)
    close(module.norm(x).reshape(2, 24, -1), golden("hidden_states", version)[3])


def paged_batch(row_pages, contexts, lengths, page_size):
    """Packs one segment per row at positions contexts[r] .. contexts[r] + lengths[r]."""
    slots = [
        pages[p // page_size] * page_size + p % page_size
        for pages, start, length in zip(row_pages, contexts, lengths)
        for p in range(start, start + length)
    ]
    return attention.PagedBatch(
        cu_q_lens=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        context_lens=jnp.asarray(contexts, jnp.int32),
        kv_lens=jnp.asarray(np.add(contexts, lengths), jnp.int32),
        page_table=jnp.asarray(row_pages, jnp.int32),
        kv_indices=jnp.asarray(slots, jnp.int32),
    )


@pytest.mark.parametrize(
    ("version", "page_size"),
    marks.every(4, [("llada2", 8), ("llada2", 4), ("llada2", 16), ("llada22", 8)]),
)
def test_chunked_paged_forward_equals_the_full_forward(version, page_size):
    loaded, ids = model(version=version), golden("inputs", version)
    pages_per_row = -(-24 // page_size)
    # Pages of the two rows alternate and run backwards; page 0 stays unused.
    order = np.arange(2 * pages_per_row, 0, -1).reshape(pages_per_row, 2).T
    pool_shape = (2 * pages_per_row + 1, 2, 2, page_size, 16)
    caches = [jnp.full(pool_shape, jnp.nan) for _ in range(3)]
    # Prefill in unequal chunks, then one decode block on every row.
    for contexts, lengths in (((0, 0), (16, 8)), ((16, 8), (0, 8)), ((16, 16), (8, 8))):
        batch = paged_batch(order.tolist(), contexts, lengths, page_size)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(contexts, lengths)])
        tokens = np.concatenate(
            [ids[r, c : c + n] for r, (c, n) in enumerate(zip(contexts, lengths))]
        )
        hidden, caches = loading.apply(
            loaded.graphdef,
            loaded.params,
            jnp.asarray(tokens),
            jnp.asarray(positions),
            attend=attention.paged_attend(batch, visibility="block_causal", block_size=BLOCK),
            caches=caches,
        )
        logits = loading.merge(loaded.graphdef, loaded.params).logits(hidden)
        expected = [
            golden("logits", version)[r, c : c + n]
            for r, (c, n) in enumerate(zip(contexts, lengths))
        ]
        close(logits, np.concatenate(expected))


@one_version
@pytest.mark.parametrize("length", [5, 8])
def test_invalid_tokens_do_not_change_valid_ones(version, length):
    loaded, ids = model(version=version), golden("inputs", version)[:1, :length]
    mask = attention.visibility_mask(16, 8, "block_causal") & (np.arange(16) < length)
    mask |= np.eye(16, dtype=bool)
    padded = jnp.asarray(np.concatenate([ids[0], np.zeros(16 - length, np.int32)]))
    hidden, _ = loading.apply(
        loaded.graphdef,
        loaded.params,
        padded,
        jnp.arange(16),
        attend=attention.dense_attend(mask, 1),
        caches=[None] * 3,
        valid=jnp.arange(16) < length,
    )
    logits = loading.merge(loaded.graphdef, loaded.params).logits(hidden)[:length]
    alone = full_forward.FullModel(loaded).logits(ids)[0]
    close(logits, alone)
    if length == 8:
        close(logits, golden("logits", version)[0, :8])


@pytest.mark.campaign
def test_gradient_of_the_dense_path_is_the_finite_difference():
    loaded, ids = model("dense"), golden("inputs")[:1, :8]
    mask = attention.visibility_mask(8, BLOCK, "block_causal")

    def loss(params):
        logits = dense_logits(loaded, params, ids, mask)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 5])

    grads = jax.jit(jax.grad(loss))(loaded.params)
    for path in ("layers.2.mlp.experts.w_down", "layers.0.attention.w_qkv", "word_embeddings"):
        direction = grads[path] / jnp.linalg.norm(grads[path])
        step = 1e-2
        up = loss(loaded.params | {path: loaded.params[path] + step * direction})
        down = loss(loaded.params | {path: loaded.params[path] - step * direction})
        slope = float(up - down) / (2 * step)
        # Float32 differences of a loss near 6 carry about 1e-4 of noise at this step.
        np.testing.assert_allclose(slope, float(jnp.linalg.norm(grads[path])), rtol=0.03, atol=2e-3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "batch, length"),
        ([[]], "batch, length"),
        ([[0.5]], "integer"),
        ([[1, 320]], "from 1 to 320"),
        ([[-1]], "from -1"),
        ([[1] * 513], "max_position_embeddings=512"),
    ],
    ids=["one-dim", "empty", "float", "too-large", "negative", "too-long"],
)
def test_bad_ids_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        full_forward.FullModel(model()).logits(ids)
