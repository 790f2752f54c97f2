"""`jdllm eval --task scenes`: a server that draws what captions say, and a real engine."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from PIL import Image
from support import edge, fake_images, image_engine, socket_server
from support import golden_images as golden

from jdllm.eval import __main__
from jdllm.eval.scenes import pictures, summary
from jdllm.tasks import registry
from jdllm.tasks.scenes import drawing, generator

SIZE = (64, 96)  # the fake pipeline's
COUNT = 12
SCENES = [generator.generate(i, split="test", size=SIZE) for i in range(COUNT)]
DRAWN = {scene.caption: drawing.render(scene) for scene in SCENES}
BLANK = SCENES[1].caption  # a grey sheet at any number of steps
NEEDS_FOUR = SCENES[2].caption  # right with four steps or more


class DrawingEngine(fake_images.FakeImageEngine):
    """Draws the scenes of captions that it knows, with one wrong and one that needs steps."""

    def model_info(self):
        sampling = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 4}
        return {**super().model_info(), "preferred_sampling_params": sampling}

    def _events(self, request, name, index, step):
        events = super()._events(request, name, index, step)
        steps = request.num_inference_steps
        is_blank = request.prompt == BLANK or (request.prompt == NEEDS_FOUR and steps < 4)
        picture = np.full((*SIZE, 3), 128, np.uint8) if is_blank else DRAWN[request.prompt]
        return [
            dataclasses.replace(event, image=picture) if event.kind == "final" else event
            for event in events
        ]


@pytest.fixture(scope="module")
def engine():
    return DrawingEngine()


@pytest.fixture(scope="module")
def url(engine):
    with socket_server.serving(edge.make_state(engine)) as port:
        yield f"http://127.0.0.1:{port}"


def run(url, out, *extra):
    argv = ["--task", "scenes", "--base-url", url, "--output-dir", str(out), "--parallel", "3"]
    return __main__.main([*argv, *extra])


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_run_against_a_server(url, engine, tmp_path, capsys):
    engine.seen.clear()
    assert run(url, tmp_path, "--limit", str(COUNT), "--seed", "5") == 0
    found = results(tmp_path)
    accuracy = (COUNT - 1) / COUNT
    assert found["accuracy"] == pytest.approx(accuracy)
    stderr = math.sqrt(accuracy * (1 - accuracy) / (COUNT - 1))
    assert found["accuracy_stderr"] == pytest.approx(stderr)
    assert found["invalid_rate"] == pytest.approx(1 / COUNT)
    assert found["nfe_mean"] == 4
    assert found["by_kind"]["count"] == {
        "accuracy": found["accuracy"],
        "accuracy_stderr": found["accuracy_stderr"],
        "num_examples": COUNT,
    }
    stated = sum(bool(scene.relations) for scene in SCENES)
    assert found["by_kind"]["relation"]["num_examples"] == stated > 2
    assert found["backend"]["kind"] == "http" and "api" not in found["backend"]
    assert found["results"]["scenes"]["accuracy,none"] == found["accuracy"]
    assert sorted(one.seed for one in engine.seen) == list(range(5, 5 + COUNT))
    rows = {r["id"]: r for r in map(json.loads, (tmp_path / "samples.jsonl").open())}
    wrong = rows[SCENES[1].id]
    assert not wrong["correct"] and wrong["wrong"][0].startswith(("ground", "count"))
    assert not any(wrong["kinds"].values())
    picture = np.asarray(Image.open(tmp_path / "pictures" / f"{SCENES[0].id}.png"))
    assert np.array_equal(picture, DRAWN[SCENES[0].caption])
    with Image.open(tmp_path / "contact.png") as sheet:
        assert sheet.size == (8 * (96 + 6 + 4) + 4, 2 * (64 + 6 + 4) + 4)
    shown = capsys.readouterr().out
    assert f"Examples: {COUNT}, accuracy 91.7 % ± 8.3 %" in shown
    assert "relation" in shown


def test_a_sweep_and_a_resumed_run(url, engine, tmp_path):
    argv = ("--sweep", "num_inference_steps=1,4")
    assert run(url, tmp_path, "--limit", "4", *argv) == 0
    engine.seen.clear()
    assert run(url, tmp_path, "--limit", "6", *argv) == 0
    assert len(engine.seen) == 2 * 2  # the first four are kept
    points = [results(tmp_path / f"num_inference_steps={n}") for n in (1, 4)]
    assert [one["accuracy"] for one in points] == [4 / 6, 5 / 6]
    assert [one["nfe_mean"] for one in points] == [1, 4]
    header, *rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert header.startswith("num_inference_steps,accuracy,") and header.endswith(",ground")
    assert [row.split(",")[0] for row in rows] == ["1", "4"]
    assert "| 4 | 83.3 %" in (tmp_path / "summary.md").read_text()
    assert run(url, tmp_path, "--limit", "6", *argv, "--seed", "3") == 2  # another run's folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-shots 2", "--num-shots is for tasks of texts"),
        ("--temperature 0.5", "--temperature is for tasks of texts"),
        ("--dllm threshold=0.9", "--dllm is for tasks of texts"),
        ("--max-new-tokens 9", "--max-new-tokens is for tasks of texts"),
        ("--data x", "--data is for tasks of texts"),
        ("--api completion", "--api is for tasks of texts"),
        ("--model_args model_path=x", "--model-args is for tasks of texts"),
        ("--sweep threshold=0.5", "with one of num_inference_steps, guidance_scale, residual"),
        ("--sweep num_inference_steps=a", "--sweep"),
        ("--sweep num_inference_steps=1,2,1", "num_inference_steps has the value 1 twice"),
        ("--sweep num_inference_steps=1 --num-inference-steps 2", "both give"),
        ("--dtype float32", "--dtype is for evaluation in process"),
        ("--image-size big", "--image-size: size must be WIDTHxHEIGHT"),
        ("--image-size 32x32", "scenes cannot be drawn at 32x32"),
    ],
)
def test_wrong_flags_are_named(url, tmp_path, capsys, line, message):
    assert run(url, tmp_path / "out", *line.split()) == 2
    assert message in capsys.readouterr().err


def test_flags_of_pictures_are_refused_for_texts(tmp_path, capsys):
    argv = ["--task", "arithmetic", "--output-dir", str(tmp_path), "--num-inference-steps", "3"]
    assert __main__.main(argv) == 2
    assert "--num-inference-steps is for --task scenes" in capsys.readouterr().err


def test_a_refused_request_ends_the_run_and_names_the_scene(url, tmp_path, capsys):
    assert run(url, tmp_path, "--limit", "2", "--num-inference-steps", "99") == 1
    error = capsys.readouterr().err
    assert "scene test-0-" in error and "num_inference_steps" in error


def test_in_process():
    backend = pictures.InProcess(image_engine.shared())
    assert backend.default_size == (128, 128)
    wanted = pictures.Wanted(prompt="a cat", height=96, width=64, seed=3, num_inference_steps=2)
    made, seconds = pictures.timed(backend, wanted)
    assert made.picture.shape == (96, 64, 3) and made.picture.dtype == np.uint8 and seconds > 0
    assert made.skipped_steps == 0
    assert backend.describe()["model"] == "golden"
    with pytest.raises(__main__.backends.BackendError, match="multiple of"):
        backend.picture(dataclasses.replace(wanted, width=65))


def test_options_of_texts_are_refused_in_process_too(tmp_path, capsys):
    argv = ["--task", "scenes", "--output-dir", str(tmp_path), "--context-length", "64"]
    assert __main__.main([*argv, "--model-path", str(golden.PIPELINE)]) == 2
    assert "context_length=64 has no meaning for this model" in capsys.readouterr().err


def test_without_any_statement_a_kind_has_no_share():
    task = registry.IMAGE_TASKS["scenes"]
    record = {"correct": True, "kinds": {"count": True}, "invalid": False, "nfe": 1, "latency": 1.0}
    found = summary.summarize(task, [record], [])
    assert found["by_kind"]["relation"] == {
        "accuracy": None,
        "accuracy_stderr": None,
        "num_examples": 0,
    }
    assert (found["accuracy"], found["accuracy_stderr"]) == (1.0, None)
    assert "relation" not in summary.lines(task, found)
