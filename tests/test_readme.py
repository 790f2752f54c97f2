"""Keeps README and docs true: their flags, paths, names and routes exist."""

from __future__ import annotations

import json
import math
import pathlib
import re

import pytest
import safetensors
from support import docs_tables, snippets

from jdllm.algorithms import lookup
from jdllm.checkpoint import source
from jdllm.foreign import fields
from jdllm.options import config
from jdllm.server import cli
from jdllm.tasks import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
TEXT = "\n".join([README, *DOCS.values()])


def test_the_two_commands_stand_on_their_own_lines():
    lines = README.splitlines()
    assert "pip install . && python -m jdllm.serve" in lines
    assert "pip install '.[test]' && python -m pytest -n 2 --dist loadfile" in lines


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert README.count("\n") <= 130
    for name, text in snippets.PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / name).parent.joinpath(link).is_file(), f"{name}: {link}"


def test_scripts_that_are_named_exist():
    scripts = set(re.findall(r"\bscripts/\w+\.py", TEXT))
    assert len(scripts) > 5
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("words", snippets.commands(), ids=" ".join)
def test_commands_are_understood(words):
    names = next(names for names in snippets.MAINS if words[1 : 1 + len(names)] == names)
    rest = list(words[1 + len(names) :])
    if names == ("serve",):
        cli.parse(rest)  # also checks the values
    else:
        snippets.parser_of(names).parse(rest)


@pytest.mark.parametrize("line", re.findall(r"`(jdllm eval --[^`]*--limit[^`]+)`", TEXT))
def test_evaluations_in_the_text_can_be_copied(line):
    if "..." not in line:
        snippets.parser_of(("eval",)).parse(line.split()[2:])


def test_every_command_is_shown_somewhere():
    shown = {names for words in snippets.commands() for names in (words[1:2], words[1:3])}
    assert set(snippets.MAINS) - shown == {("convert",)}


def test_paths_of_the_layout_exist():
    block = DOCS["architecture.md"].split("## Layout")[1].split("```")[1]
    paths = re.findall(r"(?:^|\s)((?:jdllm/|pallas_kernels/|configs/|tests/)[\w./]*)", block)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert (ROOT / "configs/train/nano.yaml").exists()


@pytest.mark.parametrize("kind", [lookup.BLOCK, lookup.CANVAS, lookup.UNIFORM])
def test_algorithms_and_options_are_those_of_the_table(kind):
    for table in (docs_tables.algorithms(kind), docs_tables.algorithm_options(kind)):
        assert table in TEXT, f"put this into docs/algorithms.md:\n{table}"


def test_support_matrix_names_what_exists():
    for name in ("regex", "json_schema", "structural_tag"):
        assert name in fields.NEUTRAL_ONLY
    with pytest.raises(ValueError, match="ep_size"):
        config.EngineConfig(ep_size=1).check_for("images")
    config.EngineConfig(tp_size=2).check_for("images")
    for task in registry.TASKS:
        assert f"--task {task}" in TEXT


def test_routes_exist():
    row = next(line for line in README.splitlines() if line.startswith("| Endpoints"))
    code = "".join(path.read_text() for path in (ROOT / "jdllm" / "server").rglob("*.py"))
    routes = re.findall(r"`(/[\w/]+)`", row)
    assert len(routes) > 10
    assert [route for route in routes if f'"{route}"' not in code] == []


def test_facts_of_the_bundled_models():
    nano, canvas = (
        json.loads((source.bundled_model(name) / "config.json").read_text())
        for name in source.BUNDLED_MODELS
    )
    assert (nano["num_hidden_layers"], nano["num_experts"]) == (6, 8)
    assert nano["block_size"] == 32
    assert "(six layers, eight experts, blocks of 32)" in TEXT
    assert canvas["n_layers"] == 8
    weights = source.bundled_model("jdllm-nano-canvas") / "model.safetensors"
    with safetensors.safe_open(weights, framework="numpy") as tensors:
        sizes = [math.prod(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()]
    assert f"(eight layers, {sum(sizes) / 1e6:.1f} million parameters)" in TEXT
