"""The wheel holds what the main job needs: code, the bundled model, nothing else."""

from __future__ import annotations

import configparser
import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from jdllm import __main__
from jdllm.checkpoint import source

ROOT = pathlib.Path(__file__).resolve().parents[1]
MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Builds from a copy, so that neither an old build folder nor the checkout is touched."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("jdllm", "pallas_kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(tree)]
    if can_build_wheels():
        command.append("--no-build-isolation")
    done = subprocess.run(
        [*command, "-w", str(tree / "dist")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "dist").glob("jdllm-*.whl")
    return zipfile.ZipFile(built)


def can_build_wheels() -> bool:
    """Says whether this environment's own setuptools will do; otherwise pip fetches one."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return False
    # Since 70.1 setuptools builds wheels without the `wheel` package.
    return tuple(map(int, version.split(".")[:2])) >= (70, 1)


def files(folder: pathlib.Path, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in folder.rglob(pattern) if path.is_file()}


@pytest.mark.campaign
def test_all_code_and_all_assets_are_in_the_wheel(wheel):
    names = set(wheel.namelist())
    code = files(ROOT / "jdllm", "*.py") | files(ROOT / "pallas_kernels", "*.py")
    assets = files(ROOT / "jdllm" / "assets", "*")
    problems = files(ROOT / "jdllm" / "tasks", "*.txt")
    assert "jdllm/tasks/word_problems/problems/one_step.txt" in problems
    page = files(ROOT / "jdllm" / "server" / "playground" / "static", "*")
    assert "jdllm/server/playground/static/index.html" in page
    tables = files(ROOT / "pallas_kernels", "*.json")
    assert "pallas_kernels/extend_attention/tiles/nvidia_h200.json" in tables
    tokenizers = {f"{name}/tokenizer.json" for name in source.BUNDLED_MODELS}
    tokenizers |= {f"{name}/tokenizer/tokenizer.json" for name in source.BUNDLED_IMAGE_MODELS}
    assert {f"jdllm/assets/{path}" for path in tokenizers} <= assets
    assert (code | assets | tables | problems | page) - names == set()


@pytest.mark.campaign
def test_nothing_else_is_in_the_wheel(wheel):
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {
        "jdllm",
        "pallas_kernels",
    }
    assert any(
        name.endswith("licenses/LICENSE") or name.endswith("LICENSE") for name in wheel.namelist()
    )


@pytest.mark.campaign
def test_the_wheel_installs_the_command(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    module, _, function = entries["console_scripts"]["jdllm"].partition(":")
    assert f"{module.replace('.', '/')}.py" in wheel.namelist()
    assert (module, function) == (__main__.main.__module__, __main__.main.__name__)


@pytest.mark.parametrize("name", source.BUNDLED_MODELS)
def test_a_bundled_model_is_complete_and_small(name):
    folder = ROOT / "jdllm" / "assets" / name
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= sizes.keys()
    assert any(name.endswith(".safetensors") for name in sizes)
    assert sum(sizes.values()) <= 24 * MEBIBYTE
    assert max(sizes.values()) < 16 * MEBIBYTE


@pytest.mark.parametrize("name", source.BUNDLED_IMAGE_MODELS)
def test_the_parts_of_a_bundled_image_model_take_at_most_10_megabytes(name):
    folder = ROOT / "jdllm" / "assets" / name
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert {"model_index.json", "generation_config.json"} <= sizes.keys()
    assert sum(name.endswith(".safetensors") for name in sizes) == 3
    assert sum(sizes.values()) <= 10_000_000
