"""The adapter beside Nemotron's weights: what its files say, what it adds and to which tokens."""

import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import nemotron_adapter, nemotron_oracle
from support.nemotron_adapter import LAYERS, module, tensors, write

from jdllm import convert, errors
from jdllm.device import sharding
from jdllm.engine.start import weights_fit
from jdllm.layers import attention, low_rank
from jdllm.models import draft_adapter, loading, split

FOLDER = nemotron_adapter.FOLDER
CONFIGS = pathlib.Path(__file__).resolve().parents[3] / "configs"
PARAMETERS = {
    f"layers.{i}.attention.out_adapter.{one}" for i in range(LAYERS) for one in ("down", "up")
}


def load(folder, *, is_adapted=True, **options):
    config = loading.read_config(folder)
    if is_adapted:
        config = loading.with_draft_adapter(config, folder)
    return loading.load(folder, config=config, dtype="float32", show_progress=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("adapter") / "model")


@pytest.fixture(scope="module")
def adapted(folder):
    return load(folder)


def logits(model, ids, masks, drafts):
    def forward(params, ids, masks, drafts):
        module = loading.merge(model.graphdef, params)
        hidden, _ = module(
            ids.reshape(-1),
            jnp.tile(jnp.arange(ids.shape[1]), len(ids)),
            attend=attention.dense_attend(masks, len(ids)),
            caches=[None] * LAYERS,
            drafts=drafts,
        )
        return module.logits(hidden).reshape(*ids.shape, -1)

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(forward)(model.params, ids, masks, drafts))


def test_only_drafts_have_the_adapter_in_a_forward_of_all(folder, adapted):
    """Three rows: a draft, the same block of a row that does not draft, a causal forward."""
    T, block = 40, 8
    ids = np.tile(np.random.default_rng(0).integers(0, 90, T), (3, 1))
    causal = np.tri(T, dtype=bool)
    masks = np.stack([causal | (np.arange(T)[:, None] >= T - block)] * 2 + [causal])
    drafts = np.zeros((3, T), bool)
    drafts[0, T - block :] = True
    found = logits(adapted, ids, masks, drafts.reshape(-1))
    oracle = nemotron_oracle.Model(folder, folder / "linear_spec_lora")
    expected = [
        oracle.forward(ids[0], block, drafts=True),
        oracle.forward(ids[0], block),
        oracle.forward(ids[0]),
    ]
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-4)
    assert np.abs(expected[0] - expected[1])[T - block :].max() > 0.1
    plain = logits(load(folder, is_adapted=False), ids, masks, None)
    np.testing.assert_array_equal(found[1:], plain[1:])


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({}, tensors()),
        ({"use_rslora": True}, tensors()),
        ({"r": 3, "rank_pattern": {module(1): 5}}, tensors(lambda i: 5 if i == 1 else 3)),
        ({"alpha_pattern": {module(0): 7.5, module(2): 1}}, tensors()),
        ({"layers_to_transform": [0, 2], "layers_pattern": "layers"}, tensors(layers=[0, 2])),
        ({"layers_to_transform": 1}, tensors(layers=[1])),
        ({"target_modules": ["self_attn.o_proj"]}, tensors()),
        ({"target_modules": [module(2)]}, tensors(layers=[2])),
    ],
)
def test_keys_of_ranks_scales_and_layers_are_honoured(config, stored, tmp_path):
    model = load(write(tmp_path / "model", config, stored))
    expected = nemotron_oracle.added_weights(tmp_path / "model" / "linear_spec_lora")
    found = {}
    for i, layer in enumerate(model.config.layers):
        if layer.attention.out_adapter is not None:
            down, up = (
                np.asarray(model.params[f"layers.{i}.attention.out_adapter.{one}"])
                for one in ("down", "up")
            )
            found[module(i)] = layer.attention.out_adapter.scale * (up @ down)
    assert found.keys() == expected.keys() and found
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6, rtol=1e-5)


def test_keys_of_training_are_neutral(tmp_path):
    keys = {
        "task_type": "CAUSAL_LM", "lora_dropout": 0.1, "peft_version": "0.18.0",
        "init_lora_weights": "gaussian", "layers_pattern": ["layers"], "modules_to_save": [],
        "a_key_of_tomorrow": [],
    }  # fmt: skip
    found = load(write(tmp_path / "model", keys)).config
    assert found == load(write(tmp_path / "plain")).config and found.has_draft_adapter


@pytest.mark.parametrize(("size", "layers", "hidden"), [("3b", 26, 3072), ("14b", 40, 5120)])
def test_the_published_adapters_fit_the_published_models(size, layers, hidden, tmp_path):
    """The weights are a header and a hole: nobody reads them here."""
    adapter = tmp_path / "linear_spec_lora"
    adapter.mkdir()
    config = nemotron_adapter.PUBLISHED | {"r": 128, "lora_alpha": 512}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for i in range(layers):
        for name, shape in (("lora_A", (128, 4096)), ("lora_B", (hidden, 128))):
            begin, end = end, end + 4 * shape[0] * shape[1]
            header[f"base_model.model.{module(i)}.{name}.weight"] = {
                "dtype": "F32", "shape": shape, "data_offsets": (begin, end),
            }  # fmt: skip
    text = json.dumps(header).encode()
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    plain = loading.read_config(CONFIGS / f"nemotron-labs-diffusion-{size}")
    adapted = loading.with_draft_adapter(plain, tmp_path)
    added = {layer.attention.out_adapter for layer in adapted.layers}
    assert added == {low_rank.LowRankConfig(rank=128, scale=4.0)}
    before, after = (
        weights_fit.bytes_of_rank(one, sharding.ONE_RANK, jnp.dtype("bfloat16"))
        for one in (plain, adapted)
    )
    assert after - before == end // 2, "float32 in the file, bfloat16 on the device"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", None),
        ("lora_alpha", "32"),
        ("bias", "lora_only"),
        ("use_dora", True),
        ("use_dora", 0),
        ("use_rslora", "yes"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["diffusion_head"]),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("layers_pattern", "blocks"),
        ("layers_to_transform", [3]),
        ("exclude_modules", ["encoder.layers.0.self_attn.o_proj"]),
        ("trainable_token_indices", [5]),
        ("alora_invocation_tokens", [1, 2]),
        ("target_modules", ["o_proj", "q_proj"]),
        ("target_modules", [".o_proj"]),
        ("target_modules", "all-linear"),
        ("target_modules", []),
        ("rank_pattern", {".*o_proj": 4}),
        ("rank_pattern", {"o_proj": 2.5}),
        ("alpha_pattern", {"o_proj": float("nan")}),
        ("a_key_of_tomorrow", 1),
    ],
)
def test_a_key_that_is_not_implemented_is_refused_by_name(key, value, tmp_path):
    folder = write(tmp_path / "model", {key: value})
    with pytest.raises(errors.ConfigError) as error:
        load(folder)
    assert f"linear_spec_lora/adapter_config.json: {key}" in str(error.value)
    assert "disable_draft_adapter" in str(error.value)
    assert not load(folder, is_adapted=False).config.has_draft_adapter


def renamed(stored):
    return {name.replace("lora_A.", "lora_A.default."): array for name, array in stored.items()}


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (tensors(4), r"layers\.0\.\S+lora_A\.weight is \[4, 128\], expected \[8, 128\]"),
        (tensors(layers=[0, 1]), r"missing:\n.+layers\.2\.\S+lora_A"),
        (tensors(layers=range(4)), r"unexpected:\n.+layers\.3\.\S+lora_A"),
        (renamed(tensors()), r"unexpected:\n.+lora_A\.default"),
    ],
)
def test_tensors_that_do_not_fit_are_named(stored, named, tmp_path):
    folder = write(tmp_path / "model", stored=stored)
    config = loading.read_config(folder)
    with pytest.raises(errors.ConfigError, match=rf"linear_spec_lora[\s\S]*{named}"):
        loading.with_draft_adapter(config, folder)  # before any weight is read


@pytest.mark.parametrize("torn", ["config", "weights", "no config", "no weights"])
def test_a_torn_folder_is_refused(torn, tmp_path):
    folder = write(tmp_path / "model") / "linear_spec_lora"
    name = "adapter_config.json" if "config" in torn else "adapter_model.safetensors"
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if not torn.startswith("no "):
        (folder / name).write_bytes(content[:-5])
    with pytest.raises(errors.ConfigError, match=r"linear_spec_lora[\s\S]*disable_draft_adapter"):
        load(tmp_path / "model")


def test_without_the_folder_or_the_wish_the_model_is_the_same(folder, adapted, caplog):
    plain = load(FOLDER)
    assert adapted.params.keys() - plain.params.keys() == PARAMETERS
    with caplog.at_level("INFO"):
        for load_format in ("auto", "dummy"):
            other = load(folder, is_adapted=False, load_format=load_format)
            assert other.params.keys() == plain.params.keys()
            assert other.config == plain.config
        assert caplog.text.count("linear_spec_lora: this adapter for drafts is not loaded") == 2
        assert load(folder).config == adapted.config
    assert "linear_spec_lora: this adapter is applied to drafts" in caplog.text


def test_the_config_that_is_given_is_not_read_again(folder, adapted):
    with mock.patch.object(draft_adapter.DraftAdapter, "attach") as attach:
        found = loading.load(folder, config=adapted.config, show_progress=False)
    assert found.config is adapted.config and not attach.called
    with pytest.raises(ValueError, match="block_size=8"):
        loading.load(folder, config=adapted.config, block_size=8)


def test_another_adapter_is_named_and_not_applied(folder, tmp_path, caplog):
    other = write(tmp_path / "model")
    (other / "linear_spec_lora").rename(other / "my_adapter")
    with caplog.at_level("WARNING"):
        assert not load(other).config.has_draft_adapter
    assert "my_adapter: this adapter is not applied" in caplog.text


def test_bytes_of_a_rank_count_the_adapter(folder):
    """A rank has the whole of B, and the part of A that belongs to its heads."""
    plain, dtype = loading.read_config(folder), jnp.dtype("bfloat16")
    adapted = loading.with_draft_adapter(plain, folder)
    for tp in (1, 2):
        shards = split.shards_of(plain, tp, None)
        before, after = (weights_fit.bytes_of_rank(one, shards, dtype) for one in (plain, adapted))
        assert after - before == LAYERS * 8 * (128 // tp + 64) * 2


def test_a_converted_model_has_the_same_adapter(folder, adapted, tmp_path):
    convert.convert(folder, tmp_path / "converted", show_progress=False)
    found = load(tmp_path / "converted")
    assert found.config == adapted.config and found.params.keys() == adapted.params.keys()
    for path in PARAMETERS:
        np.testing.assert_array_equal(found.params[path], adapted.params[path])
