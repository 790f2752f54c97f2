"""Text encoders whose weights wait in the host's memory: the same captions, and what it frees."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from support import golden_pipelines, marks
from support.image_launches import PROMPTS
from support.offloaded_encoders import offloaded, runner

from jdllm import errors
from jdllm.device import facts
from jdllm.models import loading, random_weights
from jdllm.models.images import host_weights, registry
from jdllm.pipelines import folder as pipeline_folder
from jdllm.runner.image import sizes

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def memory_kinds(params, prefix):
    return {array.sharding.memory_kind for path, array in params.items() if path.startswith(prefix)}


@golden_pipelines.of_each
def test_only_text_encoders_are_in_the_memory_of_the_host(golden):
    model, plain = offloaded(golden), golden.pipeline()
    encoders = model.pipeline.layout.text_encoders
    for name in encoders:
        assert memory_kinds(model.params, f"{name}.") == {facts.HOST_MEMORY}
    for prefix in ("transformer.", "vae."):
        kinds = memory_kinds(model.params, prefix)
        assert kinds == memory_kinds(plain.params, prefix) != {facts.HOST_MEMORY}
    expected = sizes.component_bytes(golden.folder(), "float32")
    of_encoders = sum(expected[name] for name in encoders)
    assert model.weight_bytes(on_host=True) == of_encoders > 0
    of_others = expected["transformer"] + expected["vae"]
    assert model.weight_bytes(on_host=False) == of_others
    assert plain.weight_bytes(on_host=False) == of_others + of_encoders
    assert plain.weight_bytes(on_host=True) == 0
    for path, array in plain.params.items():
        np.testing.assert_array_equal(np.asarray(model.params[path]), np.asarray(array))


@pytest.mark.parametrize(
    "golden", marks.every(3, golden_pipelines.PIPELINES), ids=lambda golden: golden.name
)
def test_images_are_the_same_and_nothing_stays_on_the_device(golden):
    asked = [golden.ask(prompt, steps=2, seed=i) for i, prompt in enumerate(PROMPTS)]
    plain, away = golden.device(), golden.device(runner=runner(golden))
    expected = plain.finish(*plain.enter(*asked), output="latent")
    before = on_device()
    found = away.finish(*away.enter(*asked), output="latent")
    assert on_device() == before
    # The same products in the same order; only the scheduling of the program differs.
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for name in ("slots", "captions"):
        for leaf in jax.tree.leaves(away.runner._memory[name]):
            assert leaf.sharding.memory_kind != facts.HOST_MEMORY


def on_device():
    """Returns how many bytes all live arrays take outside of the host's memory."""
    return sum(
        array.nbytes
        for array in jax.live_arrays()
        if array.sharding.memory_kind != facts.HOST_MEMORY
    )


@pytest.mark.parametrize(
    ("name", "class_name"),
    [("text_encoder", "CLIPTextModel"), ("text_encoder_2", "T5EncoderModel")],
)
def test_the_encoders_of_flux_work_from_the_memory_of_the_host(name, class_name):
    component = registry.COMPONENTS[class_name]
    config = component.read({**component.example})
    graphdef, arrays = component.abstract(config, np.dtype(np.float32))
    params = random_weights.drawn(arrays, seed=1)
    inputs = [np.ones((2, 8), np.int32)]
    if class_name == "CLIPTextModel":
        inputs = [np.full((2, config.max_positions), 3, np.int32)]
    else:
        inputs += [np.array([8, 5], np.int32)]

    @jax.jit
    def encode(params, *inputs):
        return loading.merge(graphdef, params).encode(*inputs)

    expected = np.asarray(encode(params, *inputs))
    copies = {path: array.copy() for path, array in params.items()}
    away = host_weights.moved_to_host(copies)
    assert all(array.is_deleted() for array in copies.values())
    found = encode(away, *inputs)
    assert found.sharding.memory_kind != facts.HOST_MEMORY
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-6)


@golden_pipelines.of_each
def test_weights_that_do_not_fit_are_refused_with_what_would_help(golden):
    folder = golden.folder()
    of = sizes.component_bytes(folder, "float32")
    total, without = sum(of.values()), of["transformer"] + of["vae"]

    def check(memory_bytes, *, offloads):
        sizes.check_weights(
            folder,
            "float32",
            share=0.5,
            memory_bytes=memory_bytes,
            offloads_text_encoders=offloads,
        )

    check(None, offloads=False)
    check(2 * total, offloads=False)
    check(2 * without, offloads=True)
    with pytest.raises(errors.ConfigError, match="with --text-encoder-cpu-offload only"):
        check(2 * total - 2, offloads=False)
    with pytest.raises(errors.ConfigError, match="and there --text-encoder-cpu-offload"):
        check(2 * without - 2, offloads=False)
    with pytest.raises(errors.ConfigError, match="it needs a device of") as caught:
        check(2 * without - 2, offloads=True)
    assert "--text-encoder-cpu-offload" not in str(caught.value)
    assert "transformer" in str(caught.value)


def test_the_advice_names_the_bytes_of_the_published_shapes():
    """Z-Image-Turbo on a device of 20 GB: arithmetic with the published numbers of parameters."""
    folder = pipeline_folder.read(CONFIGS / "z-image-turbo", load_format="dummy")
    of = sizes.component_bytes(folder, "bfloat16")
    assert of["transformer"] == 2 * 6_154_908_736
    with pytest.raises(errors.ConfigError) as caught:
        sizes.check_weights(
            folder,
            "bfloat16",
            share=0.85,
            memory_bytes=20 * 10**9,
            offloads_text_encoders=False,
        )
    rest = (of["transformer"] + of["vae"]) / 1e9
    assert f"with --text-encoder-cpu-offload only {rest:.1f} GB stay there" in str(caught.value)
    assert "leaves 17.0 GB of its 20.0" in str(caught.value)


def test_what_fits_in_8_bits_is_not_refused_and_is_advised():
    """Z-Image-Turbo; nine of ten weights of its transformer are a byte each."""
    folder = pipeline_folder.read(CONFIGS / "z-image-turbo", load_format="dummy")
    plain, small = (sizes.component_bytes(folder, "bfloat16", 1, of) for of in (None, "fp8"))
    assert 0.5 < small["transformer"] / plain["transformer"] < 0.55
    del plain["transformer"], small["transformer"]
    assert plain == small

    def check(memory_gb, quantization, *, offloads=False):
        sizes.check_weights(
            folder,
            "bfloat16",
            share=0.85,
            memory_bytes=memory_gb * 10**9,
            offloads_text_encoders=offloads,
            quantization=quantization,
        )

    check(20, "fp8")
    with pytest.raises(errors.ConfigError, match=r"or use --quantization fp8 \(14\.\d GB\)"):
        check(20, None)
    with pytest.raises(errors.ConfigError, match=r"or use --quantization fp8 \(6\.\d GB\)"):
        check(10, None, offloads=True)
    with pytest.raises(errors.ConfigError, match=r"fp8 and --text-encoder-cpu-offload \(6\.\d GB"):
        check(10, None)
    with pytest.raises(
        errors.ConfigError, match="in bfloat16 and fp8 .*cpu-offload only"
    ) as caught:
        check(10, "fp8")
    assert "--quantization" not in str(caught.value)
    with pytest.raises(errors.ConfigError) as caught:
        check(5, None)
    assert "--quantization" not in str(caught.value)


def test_a_device_without_such_memory_is_an_error(monkeypatch):
    array = jax.numpy.ones((2,))
    monkeypatch.setattr(
        host_weights, "facts", dataclasses.make_dataclass("Facts", ["HOST_MEMORY"])("none")
    )
    with pytest.raises(errors.ConfigError, match="text_encoder_cpu_offload"):
        host_weights.moved_to_host({"w": array})
    assert not array.is_deleted()
