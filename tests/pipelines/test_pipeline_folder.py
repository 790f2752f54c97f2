"""Folders of pipelines: what is found, every fault at once, shards, dummies, conversion."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jdllm import convert, errors
from jdllm.checkpoint import orbax_checkpoint
from jdllm.device import devices
from jdllm.models.images import registry
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines import loaded, prompts
from jdllm.pipelines import registry as pipelines

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "goldens" / "images" / "z_image" / "pipeline"
PUBLISHED = ROOT / "configs" / "z-image-turbo"
MODELS = ("text_encoder", "transformer", "vae")
FLOAT32 = dict.fromkeys(MODELS, "float32")
DIFFUSERS = "diffusion_pytorch_model"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "pipeline")
    return tmp_path / "pipeline"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    output = tmp_path_factory.mktemp("convert") / "converted"
    return convert.convert(GOLDEN, output, show_progress=False)


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(directory, dtypes=None, **options):
    folder = pipeline_folder.read(directory, **options)
    return folder.load(dtypes or FLOAT32, show_progress=False)


def assert_same(ours, reference):
    assert ours.keys() == reference.keys()
    for name, one in reference.items():
        assert ours[name].config == one.config
        assert ours[name].params.keys() == one.params.keys()
        for path, array in one.params.items():
            assert ours[name].params[path].dtype == array.dtype
            np.testing.assert_array_equal(
                np.asarray(ours[name].params[path]), np.asarray(array), err_msg=path
            )


def test_a_folder_says_what_it_holds():
    folder = pipeline_folder.read(GOLDEN)
    assert folder.class_name == "ZImagePipeline"
    assert tuple(folder.models) == MODELS
    assert folder.schedule.shift == 3.0
    assert {one.stored_dtype for one in folder.models.values()} == {"float32"}
    assert isinstance(folder.tokenizers["tokenizer"], prompts.ChatTokenizer)
    assert folder.models["transformer"].config.dim == 64


def test_tensors_arrive_where_they_belong():
    loaded = load(GOLDEN)
    stored = safetensors.numpy.load_file(GOLDEN / "transformer" / f"{DIFFUSERS}.safetensors")
    params = loaded["transformer"].params
    np.testing.assert_array_equal(
        params["layers.1.ffn_norm2.weight"], stored["layers.1.ffn_norm2.weight"]
    )
    np.testing.assert_array_equal(
        params["layers.0.attention.w_qkv"][64:128], stored["layers.0.attention.to_k.weight"]
    )
    stored = safetensors.numpy.load_file(GOLDEN / "vae" / f"{DIFFUSERS}.safetensors")
    np.testing.assert_array_equal(
        loaded["vae"].params["decoder.conv_in.kernel"],
        stored["decoder.conv_in.weight"].transpose(2, 3, 1, 0),
    )


def test_each_component_has_its_own_dtype():
    loaded = load(GOLDEN, {"text_encoder": jnp.bfloat16, "vae": "auto"})
    assert loaded.keys() == {"text_encoder", "vae"}
    dtypes = {name: {a.dtype.name for a in one.params.values()} for name, one in loaded.items()}
    assert dtypes == {"text_encoder": {"bfloat16"}, "vae": {"float32"}}
    with pytest.raises(errors.ConfigError, match="dtype='int8'"):
        load(GOLDEN, {"vae": "int8"})


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("component", "base_name"), [("transformer", DIFFUSERS), ("text_encoder", "model")]
)
def test_shards_with_and_without_an_index(folder, component, base_name, has_index):
    whole = folder / component / f"{base_name}.safetensors"
    tensors = safetensors.numpy.load_file(whole)
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        shard = f"{base_name}-0000{i + 1}-of-00003.safetensors"
        weight_map |= dict.fromkeys(names[i::3], shard)
        part = {name: tensors[name] for name in names[i::3]}
        safetensors.numpy.save_file(part, folder / component / shard)
    whole.unlink()
    # Files of another precision lie beside the weights in some repositories.
    variant = folder / component / f"{base_name}.fp16.safetensors"
    safetensors.numpy.save_file(
        {name: a.astype(np.float16) for name, a in tensors.items()}, variant
    )
    if has_index:
        index = folder / component / f"{base_name}.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load(folder), load(GOLDEN))


def test_components_without_use_are_tolerated(folder):
    change(folder / "model_index.json", feature_extractor=[None, None], image_encoder=None, _x=1)
    assert_same(load(folder), load(GOLDEN))


def test_all_faults_are_in_one_error(folder):
    change(folder / "scheduler" / "scheduler_config.json", use_karras_sigmas=True)
    change(folder / "text_encoder" / "config.json", rope_scaling={"rope_type": "yarn"})
    (folder / "tokenizer" / "tokenizer.json").unlink()
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text()[:-40])
    weights = folder / "vae" / f"{DIFFUSERS}.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    del tensors["decoder.conv_in.bias"]
    tensors["decoder.conv_out.weight"] = np.zeros((3, 8, 1, 1), np.float32)
    safetensors.numpy.save_file(tensors, weights)
    change(folder / "model_index.json", safety_checker=["stable_diffusion", "Checker"])
    with pytest.raises(errors.ConfigError) as error:
        pipeline_folder.read(folder)
    lines = str(error.value).splitlines()
    assert "6 faults" in lines[0]
    for parts in (
        ("safety_checker", "model_index.json"),
        ("text_encoder: config.json: rope_scaling.rope_type='yarn'",),
        ("transformer: ", "transformer/config.json is not valid JSON"),
        ("vae: checkpoint does not fit",),
        ("decoder.conv_in.bias",),
        ("decoder.conv_out.weight is [3, 8, 1, 1]",),
        ("tokenizer: ", "tokenizer/tokenizer.json does not exist"),
        ("scheduler: scheduler_config.json: use_karras_sigmas=True",),
    ):
        assert any(all(part in line for part in parts) for line in lines), parts


def remove(*names):
    def edit(folder):
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def put(path, **changes):
    return lambda folder: change(folder / path, **changes)


def write(path, data):
    return lambda folder: (folder / path).write_bytes(data)


INDEX = "model_index.json"


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (remove(INDEX), [INDEX, "does not exist"]),
        (write(INDEX, b'{"_class_name": "ZIm'), [INDEX, "not valid JSON"]),
        (
            put(INDEX, _class_name="FluxKontextPipeline"),
            [INDEX, "_class_name='FluxKontextPipeline'"],
        ),
        (put(INDEX, _class_name=None), [INDEX, "_class_name=None"]),
        (put(INDEX, vae=None), [INDEX, "vae: ", "vae=None", "AutoencoderKL"]),
        (put(INDEX, vae=[None, None]), [INDEX, "vae=[None, None]"]),
        (put(INDEX, vae=["diffusers", "AutoencoderTiny"]), ["'AutoencoderTiny'", "AutoencoderKL"]),
        (put(INDEX, vae=["own_code", "AutoencoderKL"]), ["'own_code'", "diffusers"]),
        (put(INDEX, vae="AutoencoderKL"), ["vae='AutoencoderKL'"]),
        (put(INDEX, transformers=["diffusers", "X"]), ["'transformers'", "mean 'transformer'"]),
        (put(INDEX, scheduler=["diffusers", "DDIMScheduler"]), ["scheduler: ", "DDIMScheduler"]),
        (put(INDEX, tokenizer=["transformers", "T5Tokenizer"]), ["tokenizer: ", "T5Tokenizer"]),
        (remove("vae"), ["vae: ", "vae/config.json", "does not exist"]),
        (remove("tokenizer"), ["tokenizer: ", "tokenizer.json does not exist"]),
        (remove("scheduler"), ["scheduler: ", "scheduler_config.json does not exist"]),
        (
            remove(f"vae/{DIFFUSERS}.safetensors"),
            ["vae: ", f"no {DIFFUSERS}.safetensors or {DIFFUSERS}-*-of-*.safetensors"],
        ),
        (write(f"vae/{DIFFUSERS}.safetensors", b"12345678901"), ["vae: ", "truncated"]),
        (put("vae/config.json", _class_name="AutoencoderTiny"), ["vae: config.json: _class_name="]),
        (put("text_encoder/config.json", architectures=["Qwen2Model"]), ["architectures=["]),
        (
            put("text_encoder/config.json", vocab_size=300),
            ["tokenizer.json: the largest id is 571"],
        ),
        (put("scheduler/scheduler_config.json", shifft=2), ["scheduler: ", "shifft=2"]),
    ],
)
def test_faults_name_component_file_and_key(folder, edit, parts):
    edit(folder)
    with pytest.raises(errors.ConfigError) as error:
        pipeline_folder.read(folder)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_dummies_need_only_configs(folder, has_tokenizer):
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    if not has_tokenizer:
        shutil.rmtree(folder / "tokenizer")
    found = pipeline_folder.read(folder, load_format="dummy")
    kind = prompts.ChatTokenizer if has_tokenizer else prompts.ByteTokenizer
    assert isinstance(found.tokenizers["tokenizer"], kind)
    assert found.models["vae"].stored_dtype == "bfloat16"
    loaded, reference = found.load(FLOAT32), load(GOLDEN)
    assert_same(loaded, found.load(FLOAT32))
    for name, one in reference.items():
        shapes = {path: array.shape for path, array in one.params.items()}
        assert {path: array.shape for path, array in loaded[name].params.items()} == shapes
    params = loaded["vae"].params
    assert not params["decoder.conv_in.bias"].any()
    assert not params["decoder.conv_norm_out.bias"].any()
    assert (params["decoder.conv_norm_out.weight"] == 1).all()
    kernel = params["decoder.conv_in.kernel"]  # [3, 3, 16, 16]
    assert kernel.std() == pytest.approx((9 * 16) ** -0.5, rel=0.1)
    other = found.load({"vae": "float32"}, seed=1)["vae"].params["decoder.conv_in.kernel"]
    assert (kernel != other).any()


def test_the_published_sizes_are_a_dummy():
    folder = pipeline_folder.read(PUBLISHED, load_format="dummy")
    sizes = {
        name: sum(
            a.size for a in one.component.abstract(one.config, jnp.dtype("bfloat16"))[1].values()
        )
        for name, one in folder.models.items()
    }
    assert sizes == {
        "text_encoder": 3_921_534_720,
        "transformer": 6_154_908_736,
        "vae": 49_545_475,
    }
    assert folder.tokenizers["tokenizer"].encode("a", max_sequence_length=9).ids == (97, 10)


def test_every_class_of_a_layout_is_registered():
    for layout in (one.layout for one in pipelines.PIPELINES.values()):
        for class_names in layout.models.values():
            assert set(class_names) <= registry.COMPONENTS.keys()
        assert {place.encoder for place in layout.tokenizers.values()} <= layout.models.keys()


def test_converted_pipelines_equal_their_originals(converted):
    found = pipeline_folder.read(converted)
    assert {one.load_format for one in found.models.values()} == {"orbax"}
    assert {one.stored_dtype for one in found.models.values()} == {"float32"}
    assert_same(found.load(FLOAT32), load(GOLDEN))
    original = pipeline_folder.read(GOLDEN)
    assert found.schedule == original.schedule
    ids = [
        one.tokenizers["tokenizer"].encode("x", max_sequence_length=99) for one in (found, original)
    ]
    assert ids[0] == ids[1]


def test_conversion_copies_all_but_the_weights(converted):
    copied = {p.relative_to(converted).as_posix() for p in converted.rglob("*.json")}
    rest = {p.relative_to(GOLDEN).as_posix() for p in GOLDEN.rglob("*.json")}
    markers = {f"{name}/{orbax_checkpoint.MARKER_NAME}" for name in MODELS}
    assert rest | markers <= copied
    assert not list(converted.rglob("*.safetensors*"))


def test_conversion_to_another_dtype(tmp_path):
    command = ["--model-path", str(GOLDEN), "--output", str(tmp_path / "half"), "--dtype"]
    assert convert.main([*command, "bfloat16"]) == 0
    half = dict.fromkeys(MODELS, "bfloat16")
    assert_same(load(tmp_path / "half", dict.fromkeys(MODELS, "auto")), load(GOLDEN, half))


def test_a_torn_conversion_is_one_of_the_faults(converted, tmp_path):
    torn = shutil.copytree(converted, tmp_path / "torn")
    next((torn / "vae" / "params").rglob("*.json")).unlink()
    change(torn / "text_encoder" / "config.json", num_hidden_layers=2)
    with pytest.raises(errors.ConfigError) as error:
        pipeline_folder.read(torn)
    assert "vae: " in str(error.value)
    assert "is incomplete" in str(error.value)
    assert "layers.1.mlp.w_down: stored [64, 128], expected None" in str(error.value)


def test_a_pipeline_with_faults_is_not_converted(folder, capsys):
    remove("vae")(folder)
    output = folder.parent / "converted"
    assert convert.main(["--model-path", str(folder), "--output", str(output)]) == 2
    assert "vae/config.json" in capsys.readouterr().err
    assert sorted(p.name for p in folder.parent.iterdir()) == ["pipeline"]


def defaults_of(folder):
    read = pipeline_folder.read(folder)
    return loaded.load(read, "float32", devices.facts(), show_progress=False).pipeline.defaults


def test_a_folder_may_give_the_defaults_of_requests(folder):
    of_class = defaults_of(folder)
    values = {"num_inference_steps": 3, "guidance_scale": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert defaults_of(folder) == dataclasses.replace(of_class, **values) != of_class


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guidance": 2}, "'guidance' is no option"),
        ({"guidance_scale": "2"}, "guidance_scale must be a finite number"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 2.5}, "num_inference_steps must be an integer"),
    ],
)
def test_defaults_that_cannot_be_are_faults_of_the_folder(folder, values, message):
    (folder / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(errors.ConfigError, match=message) as error:
        pipeline_folder.read(folder)
    assert "generation_config.json" in str(error.value)


def test_a_folder_in_place_of_the_defaults_is_a_fault(folder):
    (folder / "generation_config.json").mkdir()
    with pytest.raises(errors.ConfigError, match=r"generation_config.json cannot be read"):
        pipeline_folder.read(folder)
