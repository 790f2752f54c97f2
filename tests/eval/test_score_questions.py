"""`scripts/score_questions.py` counts right answers, and never shows a question."""

import importlib.util
import json
import pathlib
import sys
import types

import pytest

import jdllm

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "score_questions.py"
ROWS = [
    {"question": "Ada has 4 caps and finds 3. How many?", "answer": "7", "operations": "+"},
    {"question": "Bo packs 5 rows of 6 nuts. How many?", "answer": "30", "operations": "*"},
    {
        "question": "Cy has 2 packs of 8 pens, and 6 go. What stays?",
        "answer": 10,
        "operations": "*-",
    },
]
# By question; the second is wrong.
REPLIES = ["4 + 3 = <<4+3=7>>7\n#### 7", "5 + 6 = <<5+6=11>>11\n#### 11", "#### 10"]


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("score_questions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [row | {"steps": len(row["operations"])} for row in ROWS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def started(monkeypatch):
    """Replaces the model by canned replies; returns the options of each that is started."""
    found = []
    replies = dict(zip([row["question"] for row in ROWS], REPLIES, strict=True))

    class Canned:
        def __init__(self, **options):
            found.append(options)

        def chat(self, conversations, params, *, use_tqdm):
            assert params["temperature"] == 0.0
            found[-1] |= params["dllm"]
            texts = [replies[message["content"]] for ((message),) in conversations]
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(text=t)]) for t in texts]

        def shutdown(self):
            found[-1]["shut"] = True

    monkeypatch.setattr(jdllm, "LLM", Canned)
    return found


def test_right_answers_are_counted_by_steps_and_last_operation(script, file, started, capsys):
    script.main([str(file), "--model-path", "jdllm-nano-canvas", "--threshold", "0.5"])
    (options,) = started
    assert options["model"] == "jdllm-nano-canvas" and options["dtype"] == "float32"
    assert options["threshold"] == 0.5 and options["shut"]
    printed = capsys.readouterr().out
    assert [" ".join(line.split()) for line in printed.splitlines()] == [
        "all 2 of 3 66.7 % ± 33.3",
        "steps 1 1 of 2 50.0 % ± 50.0",
        "steps 2 1 of 1 100.0 % ± ?",
        "last * 0 of 1 0.0 % ± ?",
        "last + 1 of 1 100.0 % ± ?",
        "last - 1 of 1 100.0 % ± ?",
    ]
    assert not any(word in printed for word in ("Ada", "caps", "packs", "####"))


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "Dan has 9. How many?"}',
        '{"question": "Dan has 9. How many?", "answer": "9", "steps": 2, "operations": "+"}',
        '{"question": "Dan has 9. How many?", "answer": "nine", "steps": 1, "operations": "+"}',
        "Dan has 9. How many?",
    ],
)
def test_a_wrong_line_is_named_by_its_number_only(script, file, started, line):
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(SystemExit) as raised:
        script.main([str(file)])
    assert ":4 " in str(raised.value) and "Dan" not in str(raised.value)
    assert started == []
