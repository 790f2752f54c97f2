"""The notebooks: their links, their outputs, and, in the campaign, that they run on a CPU."""

from __future__ import annotations

import json
import pathlib
import re
import runpy
import subprocess

import pytest

from jdllm.train import recipes

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
# Name -> what a run on a CPU must show.
NOTEBOOKS = {
    "quickstart": ("7 + 5 = <<7+5=12>>12\n#### 12", "step by step"),
    "threshold_sweep": ("AUP: ", "image/png"),
    "infilling": ("5 + 7 = <<5+7=12>>12\n#### 12", "step by step"),
    "train_nano": ("step by step",),
    "image_grid": ("image/png",),
}
MAX_BYTES = 100_000


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def shown(notebook: dict) -> str:
    """Returns all that the cells have put out: text, HTML, and the types of pictures."""
    parts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            assert output["output_type"] != "error", output
            parts.append("".join(output.get("text", ())))
            for kind, content in output.get("data", {}).items():
                parts.append(kind if kind.startswith("image/") else "".join(content))
    return "\n".join(parts)


def test_every_notebook_is_known_and_is_shown_in_the_docs():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert set(re.findall(r"\(notebooks/(\w+)\.ipynb\)", page)) == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_file_has_a_link_outputs_and_no_ballast(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size <= MAX_BYTES
    notebook = read(name)
    (title, *_), text = notebook["cells"], shown(notebook)
    assert "".join(title["source"]).count(f"docs/notebooks/{name}.ipynb)") == 1
    assert all(part in text for part in NOTEBOOKS[name])
    assert "/root" not in path.read_text() and "/tmp" not in path.read_text()


def test_the_address_of_the_repository_is_in_one_place():
    """The script has it; README and notebooks repeat it, and nothing else does."""
    script = (ROOT / "scripts" / "notebooks.py").read_text()
    (address,) = re.findall(r'^REPOSITORY = "(https://github\.com/[\w.-]+/[\w.-]+)"', script, re.M)
    assert f'REPOSITORY = "{address}"' in (ROOT / "README.md").read_text()
    owner_and_name = address.removeprefix("https://github.com/")
    for name in NOTEBOOKS:
        cells = ["".join(cell["source"]) for cell in read(name)["cells"]]
        assert f'REPOSITORY = "{address}"' in cells[1].splitlines()
        (linked,) = re.findall(r"colab\.research\.google\.com/github/([\w./-]+)", cells[0])
        assert linked == f"{owner_and_name}/blob/main/docs/notebooks/{name}.ipynb"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no git checkout: other files are not looked at")
    holders = {
        path
        for path in files.stdout.splitlines()
        if (ROOT / path).is_file() and owner_and_name.encode() in (ROOT / path).read_bytes()
    }
    notebooks = {f"docs/notebooks/{name}.ipynb" for name in NOTEBOOKS}
    assert holders <= notebooks | {"README.md", "scripts/notebooks.py"}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_config_of_the_training_is_valid(on_gpu, tmp_path):
    """On a CPU the notebook never makes the one for a GPU."""
    cells = ["".join(cell["source"]) for cell in read("train_nano")["cells"]]
    (cell,) = [source for source in cells if "data_workers" in source]
    names = {"on_gpu": on_gpu, "MINUTES": 8}
    exec(cell.partition("pathlib.Path(")[0], names)
    path = tmp_path / "nano.yaml"
    path.write_text(names["config"])
    assert recipes.load(path, []).max_minutes == (8 if on_gpu else None)


@pytest.mark.campaign
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_on_a_cpu(name, tmp_path):
    for package in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package, reason="needs pip install '.[notebooks]'")
    script = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
    ran = script["execute"](script["with_address"](script["read"](name), name), tmp_path)
    text = shown(ran)
    assert all(part in text for part in NOTEBOOKS[name])
    assert ran.cells[1].source == "".join(read(name)["cells"][1]["source"]), "run the script"
