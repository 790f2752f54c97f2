"""Image components over ranks: shapes of parts, and what is refused before weights are read.

What needs several devices is in `tests/parallel/`.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import pytest
from support import golden_images

import jdllm
from jdllm import errors
from jdllm.device import sharding
from jdllm.models.images import registry, split, z_image_config
from jdllm.models.images.qwen_image_config import QwenImageConfig
from jdllm.pipelines import folder as pipeline_folder
from jdllm.pipelines.folder import ModelFolder
from jdllm.runner.image import sizes

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def published(name):
    return pipeline_folder.read(CONFIGS / name, load_format="dummy")


@pytest.mark.parametrize("name", registry.COMPONENTS)
def test_the_module_of_a_rank_has_the_shapes_of_the_parts(name):
    one = registry.COMPONENTS[name]
    config = one.read(one.example)
    whole = one.abstract(config, jnp.dtype("float32"))[1]
    cuts = split.cuts(config, whole, 2)
    found = one.abstract(split.local_config(config, 2), jnp.dtype("float32"))[1]
    assert found.keys() == cuts.keys() == whole.keys()
    for path, how in cuts.items():
        shape = whole[path].shape
        expected = shape if how is None else sharding.local_shape(shape, how, 2)
        assert found[path].shape == expected, path
    assert any(cuts.values()) == ("Transformer" in name)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("z-image-turbo", (1, 2)),
        ("flux-1-dev", (1, 2, 4, 8)),
        ("flux-1-schnell", (1, 2, 4, 8)),
        ("qwen-image", (1, 2, 4, 8)),
    ],
)
def test_published_transformers_are_split_as_far_as_their_heads_go(name, fits):
    folder = published(name)
    for size in sharding.SIZES:
        if size in fits:
            sizes.check_split(folder, size)
            continue
        proposal = f"cannot be divided by {size}; use tp_size {', '.join(map(str, fits))}$"
        with pytest.raises(errors.ConfigError, match=proposal):
            sizes.check_split(folder, size)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("z-image-turbo", 2),
        pytest.param("flux-1-dev", 8, marks=pytest.mark.campaign),
        pytest.param("qwen-image", 4, marks=pytest.mark.campaign),
    ],
)
def test_bytes_of_a_rank_are_those_of_arithmetic(name, tp):
    folder = published(name)
    whole, found = (sizes.component_bytes(folder, "bfloat16", size) for size in (1, tp))
    saved = 2 * numbers_of_blocks(folder.models["transformer"].config) * (tp - 1) // tp
    assert found == whole | {"transformer": whole["transformer"] - saved}


def numbers_of_blocks(config):
    """Returns the numbers of all parameters that ranks share, by the sizes of the config."""
    D = config.dim
    if isinstance(config, z_image_config.ZImageConfig):
        F = config.feed_forward_width
        return (config.n_layers + 2 * config.n_refiner_layers) * (4 * D * D + 3 * D * F)
    # q, k, v, out, and 4 D there and back; biases of all that is cut by its outputs.
    of_stream = 12 * D * D + 7 * D
    singles = 0 if isinstance(config, QwenImageConfig) else config.num_single_layers
    return (2 * config.num_layers + singles) * of_stream


def test_the_width_of_the_feed_forwards_counts_as_heads_do():
    example = registry.COMPONENTS["ZImageTransformer2DModel"].example
    odd = z_image_config.read({**example, "dim": 20, "axes_dims": [2, 4, 4]})
    message = "tp_size=2: 53 feed-forward columns cannot be divided by 2; use tp_size 1$"
    with pytest.raises(errors.ConfigError, match=message):
        split.check(odd, 2)


@pytest.fixture
def reads_nothing(monkeypatch):
    def read(*_args, **_options):
        raise AssertionError("a component was loaded")

    monkeypatch.setattr(ModelFolder, "load", read)


@pytest.mark.usefixtures("reads_nothing")
def test_engines_refuse_before_they_read_weights():
    with pytest.raises(errors.ConfigError, match="5 heads cannot be divided by 2; use tp_size 1$"):
        jdllm.ImageEngine(tp_size=2)  # the bundled model
    missing = len(jax.local_devices()) + 1
    if missing == 2:  # which the golden model could use
        with pytest.raises(errors.ConfigError, match="tp_size=2 needs 2 .*, JAX sees 1"):
            jdllm.ImageEngine(model_path=str(golden_images.PIPELINE), tp_size=missing)


def test_an_option_of_one_device_is_refused_by_name():
    with pytest.raises(
        errors.ConfigError, match="text_encoder_cpu_offload .*tp_size=2; leave it out"
    ):
        jdllm.ImageEngine(tp_size=2, text_encoder_cpu_offload=True)


def test_weights_that_do_not_fit_are_refused_with_a_size_that_would_do():
    folder = pipeline_folder.read(golden_images.PIPELINE)
    one, two = (sum(sizes.component_bytes(folder, "float32", size).values()) for size in (1, 2))
    assert two < one

    def check(memory_bytes, tp_size):
        sizes.check_weights(
            folder,
            "float32",
            share=1.0,
            memory_bytes=memory_bytes,
            offloads_text_encoders=False,
            tp_size=tp_size,
        )

    check(two, 2)
    with pytest.raises(
        errors.ConfigError,
        match=r"stay there; or use --quantization fp8 \(.* GB\); "
        r"or use --tp-size 2 \(.* GB each\)$",
    ):
        check(two, 1)
    with pytest.raises(
        errors.ConfigError, match=r"it needs devices of .* GB; or use --quantization fp8 \(.* GB\)$"
    ):
        check(two - 1, 2)
