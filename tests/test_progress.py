"""Progress in a log: few lines, whatever the pace; all of the package goes through one place."""

import io
import pathlib
import sys

import pytest

from jdllm.host import progress

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass between two updates; the bars' clock stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_a_log_gets_one_line_at_the_end_of_short_work(capsys, clock):
    with progress.bar(total=500, desc="work", unit="q") as bar:
        for _ in range(500):
            clock(0.01)
            bar.set_postfix_str("accuracy 1")
            bar.update()
    text = capsys.readouterr().err
    (line,) = text.splitlines()
    assert line.startswith("work: 100%") and "500/500" in line and "accuracy 1" in line
    assert "\r" not in text


def test_a_log_gets_a_line_every_30_seconds(capsys, clock):
    with progress.bar(total=100, initial=10) as bar:
        for _ in range(90):
            clock(10.0)
            bar.set_postfix_str("x")
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert 900 / 30 <= len(lines) <= 900 / 30 + 1
    assert "100/100" in lines[-1] and all(line for line in lines)


def test_a_bar_over_items_yields_them(capsys):
    assert list(progress.bar([1, 2, 3], desc="weights")) == [1, 2, 3]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_hidden_bar_writes_nothing(capsys):
    assert list(progress.bar(range(5), is_shown=False)) == list(range(5))
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_live_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress.bar(range(3))) == [0, 1, 2]
    assert "\r" in stream.getvalue()


def test_all_progress_of_the_package_goes_through_this_module():
    users = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "jdllm").rglob("*.py"))
        if "tqdm." in path.read_text() or "import tqdm" in path.read_text()
    ]
    assert users == ["jdllm/host/progress.py"]
