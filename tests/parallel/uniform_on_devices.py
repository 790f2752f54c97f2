"""DiffusionGemma split over ranks, on virtual CPU devices: the oracle is one device.

`test_sharding.py` runs this file in a process with eight of them.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gemma_engine, on_mesh
from support.gemma_rows import (
    CANVAS,
    GOLDEN,
    VOCAB,
    heads_of_layers,
    weights_of_rank,
    write_tame_model,
)
from support.shards import assert_same_bits
from support.tiny_engine import assert_nothing_held, random_prompts

from jdllm.device import sharding
from jdllm.layers import attention, norm, unembedding
from jdllm.runner.launch import over_mesh
from jdllm.runner.uniform import forward, reading

campaign = pytest.mark.campaign
PROMPTS = random_prompts(5, 5, longest=40, vocab=VOCAB)
PARAMS = gemma_engine.params_of(len(PROMPTS))
PARAMS[0] = PARAMS[0] | {"max_new_tokens": 50}  # so that two rows need more pages than there are


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tame_model(tmp_path_factory.mktemp("model"), num_layers=2)


@campaign
@pytest.mark.parametrize(("tp", "ep"), [(4, None), (2, 1)])
def test_each_rank_gets_its_parts(tp, ep):
    for load_format in ("safetensors", "dummy"):
        whole, _ = on_mesh.load(GOLDEN, load_format=load_format)
        parts, shards = on_mesh.load(GOLDEN, tp, ep, load_format=load_format)
        on_mesh.assert_parts_of(parts, whole, shards)


class CappedModel:
    """A head with a cap of 5, which is the embedding; the golden's own is in the engine's test."""

    def __init__(self, weight, tp):
        self.weight, self.tp = weight, tp

    def unembedding(self):
        return unembedding.LMHead(weight=self.weight, num_ranks=self.tp, softcap=5.0)

    def mix(self, weights):
        return norm.sum_of_parts((weights @ self.weight,), self.tp)[0]


@pytest.mark.parametrize("tp", [2, 8])
def test_a_reading_of_a_split_vocabulary_equals_that_of_the_whole(tp):
    """Small integers make equal logits in several shards."""
    rng = np.random.default_rng(tp)
    L, D, V = 9, 8, 48
    hidden = rng.integers(-2, 3, (L, D)).astype(np.float32)
    table = rng.integers(-2, 3, (V, D)).astype(np.float32)
    table[40] = table[3]  # a tie between the first and the last shard
    hidden[5] = 0  # all logits are equal
    hidden[6, 0] = np.nan
    keys = rng.integers(0, 2**32, (L, 2), dtype=np.uint32)

    def read(tp, weight, hidden, keys):
        model = CappedModel(weight, tp)
        return reading.read_row(model, hidden, jnp.float32(0.7), keys)

    whole = jax.jit(functools.partial(read, 1))(table, hidden, keys)
    found = jax.jit(
        jax.shard_map(
            functools.partial(read, tp),
            mesh=on_mesh.mesh_of(tp),
            in_specs=(sharding.SPLIT, sharding.REPLICATED, sharding.REPLICATED),
            out_specs=sharding.REPLICATED,
            check_vma=False,
        )
    )(table, hidden, keys)
    assert_same_bits(found)
    np.testing.assert_array_equal(found.best, whole.best)
    np.testing.assert_array_equal(found.drawn, whole.drawn)
    for name in ("logprob", "entropy", "expected"):
        mine, theirs = np.asarray(getattr(found, name)), np.asarray(getattr(whole, name))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5, err_msg=name)
    assert (
        np.isnan(np.asarray(found.logprob)[6]) and not np.isnan(np.asarray(found.logprob)[:6]).any()
    )


def step_over(model, shards, canvas, expected, keys):
    """Returns the hidden states of a denoising step without context, and its reading."""

    def step(params, memory, inputs):
        canvas, expected, keys = inputs
        module = forward.model_of(model.graphdef, params)
        mask = np.ones((len(canvas),) * 2, bool)
        hidden, _ = module.denoise(
            canvas,
            expected,
            jnp.arange(len(canvas), dtype=jnp.int32),
            attend=attention.dense_attend(mask, 1, of_windows={8: mask}),
            caches=[None] * model.spec.num_layers,
        )
        return memory, (hidden, reading.read_row(module, hidden, jnp.float32(0.7), keys))

    run = step
    if model.mesh is not None:
        run = over_mesh.on_every_rank(step, model.params, {}, model.mesh)
    with jax.default_matmul_precision("highest"):
        return jax.jit(run)(model.params, {}, (canvas, expected, keys))[1]


@pytest.mark.parametrize("tp", [4])
def test_a_split_step_equals_that_of_one_device(model, tp):
    """With one and two kv heads on four ranks, and the mixture of the step before."""
    rng = np.random.default_rng(tp)
    inputs = (
        rng.integers(0, VOCAB, CANVAS).astype(np.int32),
        rng.normal(size=(CANVAS, 64)).astype(np.float32),
        rng.integers(0, 2**32, (CANVAS, 2), dtype=np.uint32),
    )
    whole, found = (step_over(*on_mesh.load(model, ranks), *inputs) for ranks in (1, tp))
    assert_same_bits(found)
    np.testing.assert_array_equal(found[1].best, whole[1].best)
    np.testing.assert_array_equal(found[1].drawn, whole[1].drawn)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        # Sums over ranks are in another order.
        np.testing.assert_allclose(mine, theirs, atol=1e-4 * np.abs(theirs).max())


def make(model, **options):
    return gemma_engine.make(model, chunked_prefill_size=8, **options)  # one size of it


@pytest.fixture(scope="module")
def expected(model):
    with make(model) as engine:
        return engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)


@pytest.mark.parametrize(
    ("tp", "ep"),
    [
        pytest.param(4, None, marks=campaign),
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_a_split_engine_gives_the_tokens_of_one_device(model, expected, tp, ep):
    """Drawn and greedy canvases, prefix hits, preempted rows, kv heads on several ranks."""
    with make(model, tp_size=tp, ep_size=ep) as engine:
        first = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        again = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        for found in (first, again):
            assert on_mesh.answers(found) == on_mesh.answers(expected)
            for one, other in zip(found, expected, strict=True):
                metas = one["meta_info"], other["meta_info"]
                assert metas[0]["step_map"] == metas[1]["step_map"]
                logprobs = [[entry[0] for entry in m["output_token_logprobs"]] for m in metas]
                np.testing.assert_allclose(*logprobs, atol=1e-3)
        assert any(one["meta_info"]["cached_tokens"] for one in again)
        assert engine.stats().preemptions_total > 0
        assert engine.stats().jit_compiles_total == 0
        on_mesh.assert_state_is_replicated(engine, tp)
        assert_nothing_held(engine)
        check_bytes(engine, json.loads((model / "config.json").read_text())["text_config"], tp)
        info = engine.server_info()
        assert info["ep_size"] == (tp if ep is None else ep)
        assert info["kernels"]["all_reduce"].startswith("xla")


def check_bytes(engine, text, tp):
    """A rank's weights, its K and V of a token, and programs that update the pool in place."""
    built, sizes = engine._built, engine._built.sizes
    assert sizes.weight_bytes == 4 * sum(weights_of_rank(text, tp))
    per_token = sum(2 * max(heads // tp, 1) * dim for heads, dim, _ in heads_of_layers(text))
    assert sizes.kv_bytes == 4 * per_token * sizes.num_pages * sizes.page_size
    pools = built.runner._memory["pools"]
    assert sum(one.addressable_shards[0].data.nbytes for one in pools) == sizes.kv_bytes
    for bucket, compiled in built.runner.compiled.items():
        assert compiled.memory_analysis().alias_size_in_bytes >= sizes.kv_bytes, bucket
