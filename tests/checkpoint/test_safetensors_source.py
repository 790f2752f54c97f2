"""Files on disk: sharded, bfloat16, truncated, corrupt, missing."""

import json
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jdllm import errors
from jdllm.checkpoint import safetensors_source, source

INDEX_NAME = "model.safetensors.index.json"
ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.array([1.5, -2.0], ml_dtypes.bfloat16),
}


def write_shards(directory):
    safetensors.numpy.save_file({"a": ARRAYS["a"]}, directory / "one.safetensors")
    rest = {"b": ARRAYS["b"], "c": ARRAYS["c"]}
    safetensors.numpy.save_file(rest, directory / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / INDEX_NAME).write_text(text)


def test_sharded_tensors_are_read_in_their_own_dtypes(tmp_path):
    write_shards(tmp_path)
    tensors = safetensors_source.SafetensorsSource(tmp_path)
    assert tensors.shapes == {"a": (2, 3), "b": (4,), "c": (2,)}
    for name, array in ARRAYS.items():
        assert tensors.read(name).dtype == array.dtype
        np.testing.assert_array_equal(tensors.read(name), array)


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(errors.ConfigError, match="do not exist: two.safetensors"):
        safetensors_source.SafetensorsSource(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path):
    write_index(tmp_path, write_shards(tmp_path) | {"ghost": "one.safetensors"})
    with pytest.raises(errors.ConfigError, match="ghost"):
        safetensors_source.SafetensorsSource(tmp_path)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    for name in ("one", "two"):
        safetensors.numpy.save_file({"a": ARRAYS["a"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(errors.ConfigError, match="a is in .*one.safetensors and in .*two"):
        safetensors_source.SafetensorsSource(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_files_are_named(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": ARRAYS["a"]}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(errors.ConfigError, match=r"model\.safetensors.*truncated"):
        safetensors_source.SafetensorsSource(tmp_path)


def header(text):
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        header("{not json"),
        header("[1, 2]"),
        header('{"a": {"dtype": "F32"}}'),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}') + bytes(4),
        header('{"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 4]}}') + bytes(4),
        header('{"a": {"dtype": 8, "shape": [4], "data_offsets": [0, 4]}}') + bytes(4),
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}') + bytes(4),
    ],
    ids=[
        "no-json",
        "no-object",
        "no-offsets",
        "short-tensor",
        "short-int8",
        "dtype",
        "past-the-end",
    ],
)
def test_corrupt_headers_are_refused_with_the_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(errors.ConfigError, match=r"model\.safetensors"):
        safetensors_source.SafetensorsSource(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="no \\*.safetensors"):
        safetensors_source.SafetensorsSource(tmp_path)


def test_resolve_says_both_things_a_name_could_have_been():
    with pytest.raises(errors.ConfigError, match="neither a directory.*Hugging Face"):
        source.resolve("no/such/directory")


def test_resolve_wants_a_config(tmp_path):
    with pytest.raises(errors.ConfigError, match="config.json"):
        source.resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert source.resolve(str(tmp_path)) == pathlib.Path(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        source.read_json(tmp_path / "config.json")


@pytest.mark.parametrize("value", [5, None, ["one.safetensors"], "", ".", "../one.safetensors"])
def test_an_index_whose_file_is_no_file_name_is_refused(tmp_path, value):
    write_index(tmp_path, write_shards(tmp_path) | {"a": value})
    with pytest.raises(errors.ConfigError, match=rf"{INDEX_NAME}.*\['a'\]="):
        safetensors_source.SafetensorsSource(tmp_path)


def whole_file(directory):
    """Writes one file with three tensors; returns its path, and the file's bytes."""
    path = directory / "model.safetensors"
    safetensors.numpy.save_file({"a": ARRAYS["a"], "b": ARRAYS["b"]}, path)
    return path, path.read_bytes()


def test_a_file_torn_at_any_byte_is_named(tmp_path):
    path, content = whole_file(tmp_path)
    for torn in [content[:keep] for keep in range(len(content))] + [content + b"\0"]:
        path.write_bytes(torn)
        with pytest.raises(errors.ConfigError, match=r"model\.safetensors"):
            safetensors_source.SafetensorsSource(tmp_path)


@pytest.mark.parametrize("byte", [b"\0", b"-", b"9", b"[", b'"', b"\xff"])
def test_a_header_with_any_wrong_byte_is_named_or_can_be_read(tmp_path, byte):
    path, content = whole_file(tmp_path)
    end = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for place in range(end):
        path.write_bytes(content[:place] + byte + content[place + 1 :])
        try:
            tensors = safetensors_source.SafetensorsSource(tmp_path)
        except errors.ConfigError as error:
            assert "model.safetensors" in str(error) and len(str(error)) < 1000
            refused += 1
        else:
            for name in tensors.shapes.keys() - tensors.unread_dtypes.keys():
                assert tensors.read(name).shape == tensors.shapes[name]
    assert refused > end // 2


@pytest.mark.parametrize(
    "info",
    [
        '"shape": [-2, -1], "data_offsets": [0, 8]',
        '"shape": [NaN], "data_offsets": [0, 8]',
        '"shape": [2.0], "data_offsets": [0, 8]',
        '"shape": [2], "data_offsets": [0.0, 8.0]',
        '"shape": [true, 2], "data_offsets": [0, 8]',
        f'"shape": [2, {"[" * 100_000}',
    ],
    ids=["negative", "nan", "float", "float offsets", "bool", "nested"],
)
def test_sizes_that_are_no_sizes_are_named(tmp_path, info):
    content = header(f'{{"a": {{"dtype": "F32", {info}}}}}') + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(errors.ConfigError, match=r"model\.safetensors"):
        safetensors_source.SafetensorsSource(tmp_path)


def test_json_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.mkdir()
    with pytest.raises(errors.ConfigError, match=r"config\.json cannot be read"):
        source.read_json(path)
    nested = tmp_path / "nested.json"
    for content in (b"[" * 100_000, b'{"a": "\xff"}', b'{"a": ' + b"1" * 5000 + b"}"):
        nested.write_bytes(content)
        with pytest.raises(errors.ConfigError, match=r"nested\.json"):
            source.read_json(nested)
