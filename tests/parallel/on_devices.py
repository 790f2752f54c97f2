"""What a model split over ranks must keep, on virtual CPU devices.

`test_sharding.py` runs this file in a process with eight of them. The oracle is always the same
model on one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support import canvas_engine, nemotron_adapter
from support.golden_configs import GOLDENS, variant
from support.on_mesh import (
    answers,
    assert_parts_of,
    assert_state_is_replicated,
    load,
    mesh_of,
)
from support.shards import assert_same_bits, shards_by_device
from support.tiny_engine import LLADA22, SHIFTED, VOCAB, assert_nothing_held, make_engine

import pallas_kernels
from jdllm.checkpoint import orbax_checkpoint
from jdllm.device import devices, sharding
from jdllm.layers import attention, unembedding
from jdllm.models import loading
from jdllm.runner.launch import over_mesh

EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
campaign, long = pytest.mark.campaign, pytest.mark.long


# Loading


@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [
        ("llada2", 2, None),
        pytest.param("llada2", 4, 1, marks=campaign),
        pytest.param("llada2", 2, 1, marks=campaign),
        pytest.param("llada", 4, None, marks=campaign),
        pytest.param("dream", 2, None, marks=campaign),
    ],
)
def test_safetensors_orbax_and_drawn_weights_give_each_rank_its_parts(family, tp, ep, tmp_path):
    whole, _ = load(GOLDENS / family)
    parts, shards = load(GOLDENS / family, tp, ep)
    assert_parts_of(parts, whole, shards)

    stored = variant(tmp_path / "orbax", family)
    orbax_checkpoint.save(stored, whole.params, dtype="float32")
    assert_parts_of(load(stored, tp, ep, load_format="orbax")[0], whole, shards)

    drawn, _ = load(GOLDENS / family, load_format="dummy")
    drawn_parts, _ = load(GOLDENS / family, tp, ep, load_format="dummy")
    assert_parts_of(drawn_parts, drawn, shards)


def test_a_tied_head_is_split_and_the_embedding_is_not(tmp_path):
    folder = variant(tmp_path, "dream", tie_word_embeddings=True)
    whole, _ = load(folder, load_format="dummy")
    parts, shards = load(folder, 4, load_format="dummy")
    assert "lm_head" not in whole.params
    assert parts.params["lm_head"].shape == (4, 64, 64)
    assert_parts_of(parts, whole, shards)


def test_norm_head_is_normalised_before_the_cut(tmp_path):
    folder = variant(tmp_path, "llada2", norm_head=True)
    tensors = safetensors.numpy.load_file(GOLDENS / "llada2" / "model.safetensors")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    whole, _ = load(folder)
    parts, _ = load(folder, 2)
    joined = np.concatenate(list(shards_by_device(parts.params["lm_head"]).values()), axis=1)[0]
    np.testing.assert_allclose(joined, whole.params["lm_head"], rtol=1e-6)


# The forward


def logits_over(model, shards, tokens):
    """Returns the logits [ranks, T, V] of every rank."""

    def forward(params, memory, tokens):
        mask = np.ones((len(tokens), len(tokens)), bool)
        module = loading.merge(model.graphdef, params)
        hidden, _ = module(
            tokens,
            jnp.arange(len(tokens), dtype=jnp.int32),
            attend=attention.dense_attend(mask, 1),
            caches=[None] * model.spec.num_layers,
        )
        return memory, module.logits(hidden)

    with jax.default_matmul_precision("highest"):
        if model.mesh is None:
            return np.asarray(jax.jit(forward)(model.params, {}, tokens)[1])[None]
        run = over_mesh.on_every_rank(forward, model.params, {}, model.mesh)
        logits = jax.jit(run)(model.params, {}, tokens)[1]
    assert_same_bits(logits)
    assert len(logits.addressable_shards) == shards.tp
    return np.stack(list(shards_by_device(logits).values()))


@functools.cache
def eight_heads(folder):
    return load(variant(folder, "llada2", **EIGHT_HEADS), load_format="dummy")


@pytest.mark.parametrize(
    ("tp", "ep"),
    [
        pytest.param(8, None, marks=campaign),
        (4, 1),
        pytest.param(2, None, marks=campaign),
        pytest.param(8, 1, marks=campaign),
    ],
)
def test_logits_of_experts_and_shared_kv_heads_equal_those_of_one_device(tp, ep, tmp_path_factory):
    """With 4 kv heads and 8 ranks, two ranks share a kv head."""
    folder = tmp_path_factory.getbasetemp() / "eight_heads"
    tokens = np.random.default_rng(3).integers(0, VOCAB, 24).astype(np.int32)
    expected = logits_over(*eight_heads(folder), tokens)
    found = logits_over(*load(folder, tp, ep, load_format="dummy"), tokens)
    np.testing.assert_allclose(found, np.repeat(expected, tp, 0), atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("family", [pytest.param("llada", marks=campaign), "dream"])
@pytest.mark.parametrize("tp", [pytest.param(2, marks=campaign), 4])
def test_logits_of_dense_families_equal_those_of_one_device(family, tp):
    tokens = np.random.default_rng(4).integers(0, 240, 24).astype(np.int32)
    expected = logits_over(*load(GOLDENS / family), tokens)
    found = logits_over(*load(GOLDENS / family, tp), tokens)
    np.testing.assert_allclose(found, np.repeat(expected, tp, 0), atol=1e-5 * abs(expected).max())


# The vocabulary


@pytest.mark.parametrize("tp", [2, 8])
def test_merged_statistics_equal_those_of_the_whole_vocabulary(tp):
    """Small integers make equal logits in several shards, and sums without rounding."""
    rng = np.random.default_rng(tp)
    T, D, V = 9, 8, 48
    x = rng.integers(-2, 3, (T, D)).astype(np.float32)
    head = rng.integers(-2, 3, (V, D)).astype(np.float32)
    head[40] = head[3]  # a tie between the first and the last shard
    x[5] = 0  # all logits are equal
    x[6, 0] = np.nan
    arguments = {
        "given_ids": rng.integers(0, V, T).astype(np.int32),
        "draw_keys": rng.integers(0, 2**32, (T, 2), dtype=np.uint32),
        "temperature": np.where(np.arange(T) % 2, 0.7, 0.0).astype(np.float32),
    }
    forbidden = (0, 3, 47)

    def stats(head, x, arguments):
        return head.stats(x, forbidden_ids=forbidden, num_rows=jnp.int32(T), **arguments)

    whole = jax.jit(stats)(unembedding.LMHead(weight=head), x, arguments)
    mesh = mesh_of(tp)

    def on_rank(weight, x, arguments):
        mine = unembedding.LMHead(weight=weight, num_ranks=tp)
        assert mine.vocab_size == V
        return stats(mine, x, arguments), mine.logits(x), mine.logits_of(x, forbidden)

    found, logits, few = jax.jit(
        jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=(sharding.SPLIT, sharding.REPLICATED, sharding.REPLICATED),
            out_specs=sharding.REPLICATED,
            check_vma=False,
        )
    )(head, x, arguments)
    assert_same_bits((found, logits, few))
    np.testing.assert_array_equal(logits, x @ head.T)
    np.testing.assert_array_equal(few, (x @ head.T)[:, forbidden])
    for name in ("best_id", "best_logit", "second_id", "second_logit", "given_logit"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)
    np.testing.assert_array_equal(found.drawn_id, whole.drawn_id)
    np.testing.assert_array_equal(found.drawn_logit, whole.drawn_logit)
    np.testing.assert_allclose(found.logsumexp, whole.logsumexp, rtol=1e-6)
    np.testing.assert_allclose(found.entropy, whole.entropy, rtol=1e-5, atol=1e-5)
    assert np.isnan(np.asarray(found.logsumexp)[6])
    assert set(np.delete(found.best_id, 6)).isdisjoint(forbidden)  # id 0 stands for NaN


@pytest.mark.parametrize("rows", [5, 128, 133])
def test_sums_have_the_bits_of_a_sum_in_rank_order(rows):
    """Of few rows and of many, and of such that ranks cannot share evenly."""
    tp = 4
    parts = np.random.default_rng(rows).normal(size=(tp, rows, 8)).astype(jnp.bfloat16)
    run = jax.shard_map(
        lambda x: pallas_kernels.all_reduce((x[0],), axis_name=sharding.AXIS),
        mesh=mesh_of(tp),
        in_specs=sharding.SPLIT,
        out_specs=sharding.REPLICATED,
        check_vma=False,
    )
    found = jax.jit(run)(parts)
    expected = np.zeros((rows, 8), np.float32)
    for part in parts:
        expected += part.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found), expected.astype(jnp.bfloat16))
    assert_same_bits(found)


def test_ranks_take_the_word_of_the_first():
    run = jax.shard_map(
        lambda x: sharding.of_first_rank(x[0] + jax.lax.axis_index(sharding.AXIS))[None],
        mesh=mesh_of(8),
        in_specs=sharding.REPLICATED,
        out_specs=sharding.SPLIT,
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(run)(jnp.array([-7], jnp.int32)), np.full(8, -7))


# Engines


def requests(seed, count, vocab, wanted=24):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, 32).tolist()
    prompts = [
        (shared if i % 2 else []) + rng.integers(0, vocab, rng.integers(3, 20)).tolist()
        for i in range(count)
    ]
    params = [
        {"max_new_tokens": wanted + i}
        | ({"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 3 == 1 else {})
        for i in range(count)
    ]
    return {"input_ids": prompts, "sampling_params": params}


def served(engine, asked):
    """Returns answers to requests all at once, then again, from a warm prefix cache."""
    first = engine.generate(**asked)
    return first, engine.generate(**asked)


def assert_serves_as(expected, engine, asked, tp):
    first, again = served(engine, asked)
    assert [answers(first), answers(again)] == expected
    assert any(one["meta_info"]["cached_tokens"] for one in again)
    assert engine.stats().jit_compiles_total == 0
    assert_state_is_replicated(engine, tp)
    assert_nothing_held(engine)


BLOCK_SIZES = {"max_running_requests": 2, "max_total_tokens": 9 * 16, "chunked_prefill_size": 64}


BLOCK_ENGINES = {
    "llada2": BLOCK_SIZES,
    "llada22": LLADA22 | BLOCK_SIZES,  # with routing by blocks and tokens that move
    "fast_dllm_v2": BLOCK_SIZES | SHIFTED,
}
SPLIT_BLOCK_ENGINES = [("llada2", 2, None), ("llada22", 2, None), ("fast_dllm_v2", 2, 1)]
MORE_RANKS = [("llada2", 4, None), ("llada2", 4, 1), ("llada22", 4, 1)]
ASKED = requests(1, 6, 240, wanted=50)


@functools.cache
def block_answers(family):
    with make_engine(**BLOCK_ENGINES[family]) as engine:
        return [answers(one) for one in served(engine, ASKED)]


@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [
        *(pytest.param(*one, marks=campaign) for one in SPLIT_BLOCK_ENGINES),
        *(pytest.param(*one, marks=long) for one in MORE_RANKS),
    ],
)
def test_a_split_block_engine_gives_the_tokens_of_one_device(family, tp, ep):
    """Greedy and sampled rows, fused commits, prefix hits, rows that are preempted."""
    expected = block_answers(family)  # first, since compilations of the process are counted
    with make_engine(tp_size=tp, ep_size=ep, **BLOCK_ENGINES[family]) as engine:
        assert_serves_as(expected, engine, ASKED, tp)
        assert engine.stats().preemptions_total > 0
        pool_bytes = sum(one.nbytes for one in engine._built.core.runner._memory["pools"])
        assert engine._built.sizes.kv_bytes == pool_bytes / tp
        for bucket, compiled in engine._built.core.runner.compiled.items():
            assert compiled.memory_analysis().alias_size_in_bytes >= pool_bytes / tp, bucket
        info = engine.server_info()
        assert (info["tp_size"], info["ep_size"]) == (tp, tp if ep is None else ep)
        assert [one["id"] for one in info["devices"]] == list(range(tp))
        assert info["kernels"]["all_reduce"].startswith("xla")


def test_an_adapter_is_cut_as_the_weight_that_it_adds_to(tmp_path):
    folder = nemotron_adapter.write(tmp_path / "model")
    config = loading.with_draft_adapter(loading.read_config(folder), folder)
    whole, _ = load(folder, config=config)
    parts, shards = load(folder, 2, config=config)
    assert_parts_of(parts, whole, shards)
    assert parts.params["layers.0.attention.out_adapter.down"].shape == (2, 8, 64)


@campaign
@pytest.mark.parametrize("tp", [2, 4])
def test_a_split_engine_with_a_causal_context_gives_the_tokens_of_one_device(tp, tmp_path):
    """All modes in one batch, with and without draws; a rank has one of two kv heads.

    Drafts have an adapter, and how many are met shows that all ranks apply it.
    """
    asked = requests(5, 8, 90, wanted=30)
    modes = [
        {"algorithm": "MaskedDiffusion", "threshold": 0.3, "seed_first": True},
        {"algorithm": "LinearSpec"},
        {"algorithm": "Autoregressive"},
        {"algorithm": "LinearSpec", "block_length": 3},
    ]
    for i, one in enumerate(asked["sampling_params"]):
        one["dllm"] = modes[i % 4]
    sizes = BLOCK_SIZES | {
        "model_path": str(nemotron_adapter.write(tmp_path / "model")),
        "dllm_algorithm": "MaskedDiffusion,LinearSpec,Autoregressive",
        "dllm_algorithm_config": {"block_size": 16},
        "max_total_tokens": 512,  # nobody is preempted: drafts would begin elsewhere
    }
    with make_engine(**sizes) as engine:
        expected = [answers(one) for one in served(engine, asked)]
    with make_engine(tp_size=tp, **sizes) as engine:
        assert_serves_as(expected, engine, asked, tp)


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("dream", 2, marks=campaign),
        pytest.param("llada", 4, marks=campaign),
        pytest.param("dream", 4, marks=long),
    ],
)
def test_a_split_canvas_engine_gives_the_tokens_of_one_device(family, tp):
    asked = requests(2, 3, 240)
    asked["input_ids"] = [one[:20] for one in asked["input_ids"]]
    for one in asked["sampling_params"]:
        one.pop("top_p", None)  # canvases do not filter
    algorithm = canvas_engine.ALGORITHMS[family].split(",")[0]
    make = functools.partial(canvas_engine.make, family, whole_tokens=(), dllm_algorithm=algorithm)
    with make() as engine:
        expected = answers(engine.generate(**asked))
    with make(tp_size=tp) as engine:
        assert answers(engine.generate(**asked)) == expected
        assert engine.stats().jit_compiles_total == 0
        assert_state_is_replicated(engine, tp)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llada2", marks=campaign),
        pytest.param("llada22", marks=long),
        pytest.param("dream", marks=long),
    ],
)
def test_edited_logits_and_lists_of_the_best_equal_those_of_one_device(family):
    asked = requests(3, 2, 240)
    asked["input_ids"] = [one[:20] for one in asked["input_ids"]]
    for one in asked["sampling_params"]:
        one.pop("top_p", None)  # canvases do not filter
        one |= {"repetition_penalty": 1.3, "logit_bias": {"7": 1.5}}
        one |= {"return_logprob": True, "top_logprobs": 3}
    make = functools.partial(canvas_engine.make, family) if family == "dream" else make_engine
    options = LLADA22 if family == "llada22" else {}
    options = options | {"with_logits": True, "max_running_requests": 2}
    with make(**options) as engine:
        expected = engine.generate(**asked)
    with make(tp_size=2, **options) as engine:
        found = engine.generate(**asked)
    assert answers(found) == answers(expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("output_token_logprobs", "output_top_logprobs"):
            mine, theirs = (jax.tree.leaves(each["meta_info"][name]) for each in (one, other))
            assert len(mine) == len(theirs) > 0
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_devices_are_the_first_of_the_host():
    assert [one["id"] for one in devices.describe(3)] == [0, 1, 2]
    assert devices.facts(3).num_devices == 3
