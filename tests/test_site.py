"""The documentation can be read as a site: every page is in it, and every link leads somewhere."""

import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))


def test_the_menu_has_every_page():
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    shown = [page for entry in menu for page in entry.values()]
    assert sorted(shown) == sorted(map(str, PAGES))


@pytest.mark.campaign
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("zensical", reason="it comes with the extra docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        name = page.with_name("index.html" if page.name == "README.md" else page.stem + ".html")
        built = (tmp_path / "build" / "site" / name).read_text()
        assert "<title>" in built and "https://fonts." not in built, page
