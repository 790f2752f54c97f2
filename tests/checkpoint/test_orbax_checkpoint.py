"""Conversion round trips exactly; a torn copy is refused, never half read."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from support.full_disk import largest_file

from jdllm import convert, errors
from jdllm.checkpoint import orbax_checkpoint
from jdllm.models import loading

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada2"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("convert")
    original = shutil.copytree(GOLDEN, root / "original")
    (original / "tokenizer.json").write_text("{}")
    (original / "chat_template.jinja").write_text("template")
    return convert.convert(original, root / "converted", show_progress=False)


def load(directory, **options):
    return loading.load(directory, block_size=8, show_progress=False, **options)


def test_restored_parameters_equal_loaded_ones(converted):
    restored, reference = load(converted).params, load(GOLDEN).params
    assert restored.keys() == reference.keys()
    for path, array in reference.items():
        assert restored[path].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(restored[path]), np.asarray(array))


def test_the_conversion_dtype_beats_the_one_in_the_config(tmp_path):
    output = tmp_path / "half"
    code = convert.main(
        ["--model-path", str(GOLDEN), "--output", str(output), "--dtype", "bfloat16"]
    )
    assert code == 0
    loaded, reference = load(output).params, load(GOLDEN, dtype="bfloat16").params
    for path, array in reference.items():
        assert loaded[path].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(loaded[path]), np.asarray(array))


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert.orbax_checkpoint, "save", interrupted)
    output = tmp_path / "converted"
    assert convert.main(["--model-path", str(GOLDEN), "--output", str(output)]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "jdllm convert: error: interrupted; nothing is written"
    assert list(tmp_path.iterdir()) == []


def test_everything_but_the_weights_is_copied(converted):
    names = {path.name for path in converted.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any(name.endswith(".safetensors") for name in names)


def test_torn_checkpoints_are_refused(converted, tmp_path):
    stored = converted / "params"
    files = [path.relative_to(converted) for path in stored.rglob("*") if path.is_file()]
    assert len(files) > 3
    for number, name in enumerate(files):
        torn = shutil.copytree(converted, tmp_path / str(number))
        size = (torn / name).stat().st_size
        if number % 2 or not size:
            (torn / name).unlink()
        else:
            (torn / name).write_bytes((torn / name).read_bytes()[: size // 2])
        with pytest.raises(errors.ConfigError, match="incomplete"):
            load(torn)


def test_corrupt_orbax_metadata_is_a_config_error(converted, tmp_path):
    torn = shutil.copytree(converted, tmp_path / "torn")
    metadata = torn / "params" / "_METADATA"
    metadata.write_bytes(b"x" * metadata.stat().st_size)
    with pytest.raises(errors.ConfigError, match="cannot be restored"):
        load(torn)


def test_other_sizes_and_versions_are_refused(converted, tmp_path):
    other = shutil.copytree(converted, tmp_path / "other")
    hf = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(hf | {"vocab_size": 400}))
    with pytest.raises(errors.ConfigError, match="lm_head: stored .320, 64., expected .400, 64."):
        load(other)
    (other / orbax_checkpoint.MARKER_NAME).write_text('{"format_version": 99}')
    with pytest.raises(errors.ConfigError, match="format_version 99"):
        load(other)


@pytest.mark.parametrize("missing", [["--output", "x"], ["--model-path", "x"]])
def test_missing_arguments_exit_with_2(missing):
    with pytest.raises(SystemExit) as exit_info:
        convert.main(missing)
    assert exit_info.value.code == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's
def test_a_full_disk_is_one_message_and_leaves_no_copy(tmp_path, capsys):
    argv = ["--model-path", str(GOLDEN), "--output", str(tmp_path / "new")]
    size = (GOLDEN / "config.json").stat().st_size
    with largest_file(size + 100):  # the weights do not fit
        assert convert.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()  # tensorstore logs, too
    (error,) = [line for line in lines if line.startswith("jdllm convert: error: ")]
    assert "cannot write " in error and "too large" in error
    assert not (tmp_path / "new").exists()
    # In a folder in which nothing else writes, as tensorstore may go on doing in that of the first.
    with largest_file(size - 100):
        assert convert.main([*argv[:-1], str(tmp_path / "other")]) == 2
    assert "too large" in capsys.readouterr().err
    assert not (tmp_path / "other.partial" / "config.json").exists()


def test_the_place_is_tried_before_the_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["--model-path", str(tmp_path / "nowhere"), "--output"]
    for place, named in (
        ("file/new", f"output {tmp_path}/file/new cannot"),
        ("a/b/new", "nowhere"),
    ):
        assert convert.main([*argv, str(tmp_path / place)]) == 2
        assert named in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_errors_are_one_message_without_a_traceback(tmp_path, capsys):
    assert convert.main(["--model-path", str(tmp_path), "--output", str(tmp_path / "new")]) == 2
    assert convert.main(["--model-path", str(GOLDEN), "--output", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "config.json" in lines[0]
    assert "exists" in lines[1]
    assert not (tmp_path / "new").exists()
