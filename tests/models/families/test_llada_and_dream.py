"""LLaDA and Dream against the stored outputs of the reference implementations (float32)."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jdllm import convert, errors
from jdllm.layers import attention
from jdllm.models import decoder, loading
from jdllm.models.families import dream, llada
from jdllm.runner import full_forward

GOLDENS = pathlib.Path(__file__).parents[2] / "data" / "goldens"
FAMILIES = {"llada": "LLaDAModelLM", "dream": "DreamModel"}
ATOL, RTOL = 2e-4, 1e-4  # the goldens' tolerance for float32 logits and hidden states
BFLOAT16_ATOL = 0.2  # the reference's own bfloat16 forward is up to 0.13 off its float32 one
LAYERS, LENGTH = 3, 24

every_family = pytest.mark.parametrize("family", FAMILIES)


def golden(family, name):
    return np.load(GOLDENS / family / f"{name}.npy")


def golden_tensors(family):
    return safetensors.numpy.load_file(GOLDENS / family / "model.safetensors")


@functools.cache
def model(family, implementation="auto"):
    return load(GOLDENS / family, implementation=implementation)


def load(directory, **options):
    return loading.load(directory, **{"dtype": "float32", "show_progress": False} | options)


def write_model(directory, family, tensors, **changes):
    hf = json.loads((GOLDENS / family / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(hf))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def full_logits(loaded, family):
    return full_forward.FullModel(loaded).logits(golden(family, "inputs"))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=ATOL, rtol=RTOL)


def assert_same(ours, reference):
    assert ours.keys() == reference.keys()
    for path, array in reference.items():
        np.testing.assert_array_equal(np.asarray(ours[path]), np.asarray(array), err_msg=path)


@every_family
def test_logits_of_the_full_forward_are_the_reference_s_unshifted(family):
    full = full_forward.load_model(GOLDENS / family, dtype="float32")
    logits = full.logits(golden(family, "inputs").tolist())
    assert logits.dtype == jnp.float32
    close(logits, golden(family, "logits"))


@every_family
@pytest.mark.parametrize("implementation", ["dense", "xla"])
def test_every_implementation_gives_the_logits(family, implementation):
    close(full_logits(model(family, implementation), family), golden(family, "logits"))


@every_family
def test_hidden_states_equal_reference_layer_by_layer(family):
    loaded, ids = model(family), golden(family, "inputs")
    module = loading.merge(loaded.graphdef, loaded.params)
    positions = jnp.tile(jnp.arange(LENGTH), 2)
    attend = attention.dense_attend(np.ones((LENGTH, LENGTH), bool), 2)
    angles = module.angles(positions)
    x = module.embed(jnp.asarray(ids).reshape(-1), positions)
    hidden_states = golden(family, "hidden_states")
    for i, layer in enumerate(module.layers):
        close(x.reshape(2, LENGTH, -1), hidden_states[i])
        x, pending, _ = layer(x, (), angles, attend=attend, cache=None)
        x = x + sum(pending)
    close(module.norm(x).reshape(2, LENGTH, -1), hidden_states[LAYERS])


@every_family
def test_one_paged_launch_with_full_visibility_equals_the_full_forward(family):
    loaded, ids, page_size = model(family), golden(family, "inputs"), 8
    spec, pages = loaded.spec, LENGTH // page_size
    page_table = np.arange(1, 2 * pages + 1).reshape(2, pages)  # page 0 stays unused
    slots = page_table[:, :, None] * page_size + np.arange(page_size)
    batch = attention.PagedBatch(
        cu_q_lens=jnp.array([0, LENGTH, 2 * LENGTH], jnp.int32),
        context_lens=jnp.zeros(2, jnp.int32),
        kv_lens=jnp.full(2, LENGTH, jnp.int32),
        page_table=jnp.asarray(page_table, jnp.int32),
        kv_indices=jnp.asarray(slots.reshape(-1), jnp.int32),
    )
    pool_shape = (2 * pages + 1, 2, spec.num_kv_heads, page_size, spec.head_dim)
    module = loading.merge(loaded.graphdef, loaded.params)
    hidden, _ = module(
        jnp.asarray(ids).reshape(-1),
        jnp.tile(jnp.arange(LENGTH), 2),
        # The op wants whole blocks, and full visibility does not depend on their size.
        attend=attention.paged_attend(batch, visibility="full", block_size=page_size),
        caches=[jnp.full(pool_shape, jnp.nan) for _ in range(LAYERS)],
    )
    close(module.logits(hidden).reshape(2, LENGTH, -1), golden(family, "logits"))


@every_family
def test_bfloat16_stays_bfloat16_and_near_the_reference(family):
    loaded = load(GOLDENS / family, dtype="bfloat16")
    assert {array.dtype for array in loaded.params.values()} == {jnp.dtype(jnp.bfloat16)}
    hidden = jax.eval_shape(
        lambda params: loading.apply(
            loaded.graphdef,
            params,
            jnp.zeros(LENGTH, jnp.int32),
            jnp.arange(LENGTH),
            attend=attention.dense_attend(np.ones((LENGTH, LENGTH), bool), 1),
            caches=[None] * LAYERS,
        )[0],
        loaded.params,
    )
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        full_logits(loaded, family), golden(family, "logits"), atol=BFLOAT16_ATOL
    )


def test_a_llada_with_grouped_queries_and_biases_computes_what_dream_does(tmp_path):
    # An oracle for what no LLaDA release uses: Dream's weights under LLaDA's names and keys.
    config = model("dream").config
    # In the order of what they fill; q, k and v fill one parameter, in this order in both tables.
    dreams, lladas = (
        sorted(family.FAMILY.weight_rows(config), key=lambda row: row.target)
        for family in (dream, llada)
    )
    names = {
        of_dream.name: of_llada.name for of_dream, of_llada in zip(dreams, lladas, strict=True)
    }
    tensors = {names[name]: tensor for name, tensor in golden_tensors("dream").items()}
    assert "model.transformer.blocks.0.k_proj.bias" in tensors
    directory = write_model(
        tmp_path,
        "llada",
        tensors,
        include_qkv_bias=True,
        n_kv_heads=2,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    )
    close(full_logits(load(directory), "dream"), golden("dream", "logits"))


@pytest.mark.parametrize(
    ("family", "key", "head", "embedding"),
    [
        ("llada", "weight_tying", "model.transformer.ff_out", "model.transformer.wte"),
        ("dream", "tie_word_embeddings", "lm_head", "model.embed_tokens"),
    ],
)
def test_a_tied_head_is_the_embedding(family, key, head, embedding, tmp_path):
    tensors = golden_tensors(family)
    del tensors[f"{head}.weight"]
    loaded = load(write_model(tmp_path, family, tensors, **{key: True}))
    assert "lm_head" not in loaded.params
    module = loading.merge(loaded.graphdef, loaded.params)
    assert isinstance(module, decoder.Decoder)
    np.testing.assert_array_equal(module.unembedding().weight, tensors[f"{embedding}.weight"])


@every_family
def test_export_is_the_reverse_of_loading(family, tmp_path):
    loaded = model(family)
    path = tmp_path / "model.safetensors"
    loading.export_safetensors(FAMILIES[family], loaded.config, loaded.params, path)
    assert_same(safetensors.numpy.load_file(path), golden_tensors(family))
    shutil.copy(GOLDENS / family / "config.json", tmp_path)
    assert_same(load(tmp_path).params, loaded.params)


@every_family
def test_a_converted_model_is_the_same_model(family, tmp_path):
    output = convert.convert(
        GOLDENS / family, tmp_path / "converted", dtype="float32", show_progress=False
    )
    assert_same(load(output).params, model(family).params)


def test_every_disagreement_with_the_table_is_named(tmp_path):
    tensors = golden_tensors("dream")
    del tensors["model.layers.1.self_attn.v_proj.bias"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((64, 160), np.float32)
    with pytest.raises(errors.ConfigError) as error:
        load(write_model(tmp_path, "dream", tensors))
    message = str(error.value)
    assert "1 tensors missing:\n  model.layers.1.self_attn.v_proj.bias" in message
    assert "1 tensors unexpected:\n  model.layers.0.self_attn.o_proj.bias" in message
    assert "up_proj.weight is [64, 160], expected [160, 64]" in message


def test_dummy_weights_leave_biases_zero_and_need_a_config_only(tmp_path):
    shutil.copy(GOLDENS / "dream" / "config.json", tmp_path)
    params = load(tmp_path, load_format="dummy").params
    assert params.keys() == model("dream").params.keys()
    assert not np.asarray(params["layers.1.attention.b_qkv"]).any()
    assert np.asarray(params["layers.1.attention.w_qkv"]).std() == pytest.approx(64**-0.5, rel=0.05)
    assert np.isfinite(full_logits(load(tmp_path, load_format="dummy"), "dream")).all()
