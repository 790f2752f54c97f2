"""Options are checked where they are given, by type and by value, and named in the error."""

import math
import pathlib
import types
import typing

import pytest

from jdllm import errors
from jdllm.options import config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_tokenizer_init", "false"),
        ("trust_remote_code", 1),
        ("disable_radix_cache", None),
        ("context_length", True),
        ("context_length", 128.0),
        ("max_queued_requests", "5"),
        ("random_seed", 1.5),
        ("random_seed", None),
        ("mem_fraction_static", "0.8"),
        ("mem_fraction_static", True),
        ("mem_fraction_static", math.nan),
        ("dllm_algorithm", 5),
        ("dllm_algorithm", ["LowConfidence"]),
        ("dllm_algorithm_config", 3),
        ("model_path", 7),
        ("load_format", "gguf"),
        ("load_format", ["auto"]),
        ("dtype", None),
        ("log_level", "loud"),
        ("schedule_policy", "best"),
    ],
)
def test_a_wrong_engine_option_names_field_and_value(name, value):
    with pytest.raises(errors.ConfigError) as caught:
        config.EngineConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "80"),
        ("port", True),
        ("port", 70000),
        ("host", None),
        ("api_key", 5),
        ("enable_metrics", "yes"),
        ("drain_timeout_s", "30"),
        ("drain_timeout_s", math.nan),
        ("log_level_http", "loud"),
        ("max_body_bytes", 1e6),
        ("max_choices_per_request", 0),
    ],
)
def test_a_wrong_server_option_names_field_and_value(name, value):
    with pytest.raises(errors.ConfigError) as caught:
        config.ServerConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value) or name == "api_key"


def test_an_api_key_of_a_wrong_type_is_not_shown():
    with pytest.raises(errors.ConfigError) as caught:
        config.ServerConfig(api_key=48151623)
    assert "api_key" in str(caught.value)
    assert "48151623" not in str(caught.value)


def test_right_types_pass():
    options = {"threshold": 0.5}
    assert config.EngineConfig(dllm_algorithm_config=options).algorithm_options() == options
    frozen = types.MappingProxyType(options)
    assert config.EngineConfig(dllm_algorithm_config=frozen).algorithm_options() == options
    assert config.ServerConfig(drain_timeout_s=3).drain_timeout_s == 3
    assert config.EngineConfig(context_length=64, dllm_algorithm="LowConfidence")


def test_paths_may_be_path_objects():
    assert config.EngineConfig(model_path=pathlib.Path("some/model")).model_path == "some/model"


@pytest.mark.parametrize("block_size", [True, 0, "8"])
def test_a_wrong_block_size_is_refused(block_size):
    with pytest.raises(errors.ConfigError, match="block_size"):
        config.EngineConfig(dllm_algorithm_config={"block_size": block_size})


@pytest.mark.parametrize("cls", [config.EngineConfig, config.ServerConfig])
def test_every_annotation_is_one_the_check_understands(cls):
    for hint in typing.get_type_hints(cls).values():
        assert isinstance(config.matches(None, hint), bool)
    with pytest.raises(TypeError):
        config.matches([], list[int])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nport: 2\n", ["duplicate key 'port'", "line 2"]),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", ["duplicate key 'b'", "line 4"]),
        ("[{x: 1, x: 1}]", ["duplicate key 'x'", "line 1"]),
        ("a: 2026-13-41", ["month"]),
        ("[" * 5000, []),
        ("a: [1", ["line 1"]),
        ("? [1]\n: 2", ["unhashable"]),
    ],
)
def test_a_broken_yaml_text_names_origin_and_reason(text, words):
    with pytest.raises(errors.ConfigError, match=r"^serve\.yaml is not valid YAML: ") as caught:
        config.parse_yaml(text, "serve.yaml")
    message = str(caught.value)
    assert all(word in message for word in words)
    assert "\n" not in message and len(message) < 500


def test_yaml_keys_may_repeat_in_different_mappings_and_merges():
    text = "base: &base {a: 1, b: 2}\nnext: {<<: *base, b: 3}\nlist: [{a: 1}, {a: 2}]"
    value = config.parse_yaml(text, "x")
    assert value["next"] == {"a": 1, "b": 3} and value["list"] == [{"a": 1}, {"a": 2}]


def test_duplicate_keys_of_an_algorithm_file_name_the_file(tmp_path):
    path = tmp_path / "algorithm.yaml"
    path.write_text("threshold: 0.9\nthreshold: 0.8\n")
    with pytest.raises(errors.ConfigError, match=r"algorithm\.yaml.*duplicate key 'threshold'"):
        config.EngineConfig(dllm_algorithm_config=str(path))
    path.write_bytes(b"threshold: \xff")
    with pytest.raises(errors.ConfigError, match=r"algorithm\.yaml cannot be read"):
        config.EngineConfig(dllm_algorithm_config=str(path))
