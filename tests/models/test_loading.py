"""Formats, dtypes and errors of loading a whole model."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jdllm import errors
from jdllm.models import decoder, loading
from jdllm.runner import expert_use

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada2"


@pytest.fixture
def tensors():
    return safetensors.numpy.load_file(GOLDEN / "model.safetensors")


def write_model(directory, tensors, **changes):
    hf = json.loads((GOLDEN / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(hf))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory, **options):
    return loading.load(directory, block_size=8, show_progress=False, **options)


def assert_same(ours, reference):
    assert ours.keys() == reference.keys()
    for path, array in reference.items():
        np.testing.assert_array_equal(np.asarray(ours[path]), np.asarray(array), err_msg=path)


def merge_experts(tensors, *, fused):
    for layer in (1, 2):
        hf = f"model.layers.{layer}.mlp"
        parts = {
            part: np.stack([tensors.pop(f"{hf}.experts.{e}.{part}_proj.weight") for e in range(32)])
            for part in ("gate", "up", "down")
        }
        if fused:
            tensors[f"{hf}.w1"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[f"{hf}.w2"] = parts["down"]
        else:
            tensors |= {f"{hf}.experts.{part}_proj": array for part, array in parts.items()}
    return tensors


@pytest.mark.parametrize("fused", [False, True], ids=["merged", "fused"])
def test_merged_and_fused_experts_load_as_split_ones(tmp_path, tensors, fused):
    directory = write_model(tmp_path, merge_experts(tensors, fused=fused))
    assert_same(load(directory).params, load(GOLDEN).params)


def test_nested_prefixes_and_skipped_tensors_load(tmp_path, tensors):
    nested = {
        f"model.{name}"
        if name.startswith("lm_head")
        else name.replace("model.", "model.language_model.", 1): t
        for name, t in tensors.items()
    }
    nested |= {"v_head.weight": np.zeros((1, 64), np.float32)}
    nested |= {"model.language_model.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert_same(load(write_model(tmp_path, nested)).params, load(GOLDEN).params)


def test_only_the_dtypes_of_weights_that_are_read_count(tmp_path, tensors):
    stored = {name: array.astype(np.float64) for name, array in tensors.items()}
    stored |= {"v_head.weight": np.zeros((1, 64), bool)}
    stored |= {"model.rotary_emb.inv_freq": np.zeros(4, np.int64)}
    assert_same(load(write_model(tmp_path, stored)).params, load(GOLDEN).params)
    name = "model.layers.0.attention.dense.weight"
    write_model(tmp_path, tensors | {name: tensors[name].astype(np.int8)})
    with pytest.raises(errors.ConfigError, match=rf"(?s)1 tensors of a dtype.*{name} is I8"):
        load(tmp_path)


def test_a_variant_beside_the_weights_is_not_read_and_alone_it_is(tmp_path, tensors):
    variant = write_model(tmp_path, tensors) / "model.fp16.safetensors"
    safetensors.numpy.save_file({"model.norm.weight": np.zeros(3, np.float16)}, variant)
    assert_same(load(tmp_path).params, load(GOLDEN).params)
    (tmp_path / "model.safetensors").replace(variant)
    assert_same(load(tmp_path).params, load(GOLDEN).params)


def test_weights_of_other_formats_are_refused_with_what_to_do(tmp_path, tensors):
    write_model(tmp_path, tensors, quantization_config={"quant_method": "fp8"})
    with pytest.raises(errors.ConfigError, match=r"'fp8'}: the weights are quantised already.*use"):
        load(tmp_path)
    write_model(tmp_path, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        errors.ConfigError, match=r"no \*.safetensors file; found pytorch_model.bin"
    ):
        load(tmp_path)


def test_every_disagreement_is_in_one_error(tmp_path, tensors):
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    tensors["model.layers.0.attention.dense.weight"] = np.zeros((64, 32), np.float32)
    tensors["model.layers.9.mlp.gate.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.lm_head.weight"] = tensors["lm_head.weight"].copy()
    tensors["model.layers.2.mlp.experts.down_proj"] = np.zeros((32, 64, 16), np.float32)
    with pytest.raises(errors.ConfigError) as error:
        load(write_model(tmp_path, tensors))
    message = str(error.value)
    assert "2 tensors missing:" in message
    assert "model.norm.weight" in message
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in message
    assert "1 tensors unexpected:\n  model.layers.9.mlp.gate.weight" in message
    assert "dense.weight is [64, 32], expected [64, 64]" in message
    assert "2 tensors matched twice:" in message
    assert "lm_head.weight by lm_head.weight and model.lm_head.weight" in message


def test_tied_embeddings_are_the_head(tmp_path, tensors):
    del tensors["lm_head.weight"]
    loaded = load(write_model(tmp_path, tensors, tie_word_embeddings=True))
    assert "lm_head" not in loaded.params
    module = loading.merge(loaded.graphdef, loaded.params)
    head = module.unembedding().weight
    np.testing.assert_array_equal(head, tensors["model.word_embeddings.weight"])


def test_norm_head_normalises_along_the_vocabulary(tmp_path, tensors):
    loaded = load(write_model(tmp_path, tensors, norm_head=True))
    head = tensors["lm_head.weight"]
    expected = head / np.sqrt((head.astype(np.float64) ** 2).sum(0, keepdims=True))
    np.testing.assert_allclose(loaded.params["lm_head"], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casting_leaves_the_router_in_float32(dtype):
    reference, loaded = load(GOLDEN).params, load(GOLDEN, dtype=dtype).params
    for path, array in loaded.items():
        is_router = ".router." in path
        assert array.dtype == (jnp.float32 if is_router else jnp.dtype(dtype)), path
        np.testing.assert_array_equal(
            np.asarray(array), np.asarray(reference[path].astype(array.dtype))
        )


def test_export_is_the_reverse_of_loading(tmp_path, tensors):
    loaded = load(GOLDEN)
    path = tmp_path / "model.safetensors"
    loading.export_safetensors("LLaDA2MoeModelLM", loaded.config, loaded.params, path)
    assert_same(safetensors.numpy.load_file(path), tensors)


def test_dummy_weights_need_a_config_only(tmp_path):
    shutil.copy(GOLDEN / "config.json", tmp_path)
    first = load(tmp_path, load_format="dummy", seed=1, dtype="bfloat16")
    params = {path: np.asarray(array, np.float32) for path, array in first.params.items()}
    assert first.params["layers.1.mlp.router.weight"].dtype == jnp.float32
    assert params["word_embeddings"].std() == pytest.approx(1.0, rel=0.05)
    assert params["lm_head"].std() == pytest.approx(64**-0.5, rel=0.05)
    residual = (2 * first.spec.num_layers) ** -0.5
    down, dense = params["layers.1.mlp.experts.w_down"], params["layers.0.mlp.w_down"]
    assert down.std() == pytest.approx(residual * 16**-0.5, rel=0.05)
    assert dense.std() == pytest.approx(residual * 96**-0.5, rel=0.05)
    assert (params["norm.weight"] == 1).all()
    assert (params["layers.1.mlp.router.expert_bias"] == 0).all()
    assert_same(load(tmp_path, load_format="dummy", seed=1, dtype="bfloat16").params, first.params)
    other = load(tmp_path, load_format="dummy", seed=2, dtype="bfloat16").params
    assert (np.asarray(other["lm_head"]) != np.asarray(first.params["lm_head"])).any()


@pytest.mark.campaign
def test_tokens_of_a_deep_dummy_go_to_different_experts(tmp_path):
    """Else its speed would be that of a model which reads a fraction of the experts."""
    source = json.loads((GOLDEN / "config.json").read_text())
    deep = source | {"num_hidden_layers": 24, "num_experts": 64, "n_group": 1, "topk_group": 1}
    (tmp_path / "config.json").write_text(json.dumps(deep))
    loaded, k = load(tmp_path, load_format="dummy"), source["num_experts_per_tok"]
    tokens = np.random.default_rng(0).permutation(300)[:32].astype(np.int32)
    used = expert_use.distinct_experts(loaded, tokens)
    expected = 64 * (1 - (1 - k / 64) ** 32)
    assert len(used) == 23 and np.mean(used[-8:]) > 0.9 * expected


def test_dummy_embeddings_of_equal_tokens_differ_by_position():
    loaded = load(GOLDEN, load_format="dummy")
    module = loading.merge(loaded.graphdef, loaded.params)
    assert isinstance(module, decoder.Decoder)
    rows = np.asarray(module.embed(jnp.full(32, 300), jnp.arange(32)))
    table = np.asarray(loaded.params["word_embeddings"])
    ids = [int(np.flatnonzero((table == row).all(-1))[0]) for row in rows]
    assert len(set(ids)) > 25  # 32 draws of 320 leave about 30.5 distinct
    again = np.asarray(module.embed(jnp.full(32, 300), jnp.arange(32)))
    np.testing.assert_array_equal(rows, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "choose auto, float32, bfloat16, float16"),
        ({"load_format": "gguf"}, "choose auto, safetensors, orbax, dummy"),
        ({"load_format": "orbax"}, "jdllm_checkpoint.json"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        load(GOLDEN, **options)


def test_unknown_architecture_is_refused_before_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(errors.ConfigError, match="GPT2LMHeadModel.*LLaDA2MoeModelLM"):
        load(tmp_path)
