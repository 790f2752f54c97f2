"""`jdllm bench images` against the app around the fake engine, and against a real engine."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import pathlib
import socket
import threading

import pytest
from support import edge, fake_images, image_engine, socket_server

from jdllm import errors
from jdllm.bench import command_line, server_flags
from jdllm.bench.images import __main__, runs, stats, targets
from jdllm.bench.images import load as image_load
from jdllm.bench.images import options as image_options
from jdllm.bench.images.load import Load, Profile
from jdllm.plots import style

STEP_S = 0.004
MIXED = (
    '[{"width": 64, "height": 64, "num_inference_steps": 2, "weight": 3},'
    ' {"width": 32, "height": 48, "num_inference_steps": 5}]'
)
# A line of SGLang's documentation, with every flag of its tool that concerns images.
SGLANG = (
    "--backend sglang-image --dataset random --task text-to-image --num-prompts 2 --width 64 "
    "--height 32 --max-concurrency 2 --request-rate 50 --num-outputs-per-prompt 2 "
    "--num-inference-steps 3 --warmup-requests 1 --warmup-num-inference-steps 1 --slo "
    "--slo-scale 100 --random-request-seed 7 --seed 3 --disable-tqdm --log-level warning"
)


def load_script(name, monkeypatch):
    """Returns a script of the repository as a module; scripts import one another."""
    path = pathlib.Path(__file__).parents[2] / "scripts" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(path.parent)
    spec.loader.exec_module(module)
    return module


class CountingEngine(fake_images.FakeImageEngine):
    """Counts steps as the engine does; every second one is shared."""

    def server_info(self):
        steps = sum(one.num_inference_steps or 0 for one in self.seen)
        counters = {
            "denoising_steps_total": steps,
            "merged_steps_total": steps // 2,
            "denoise_launches_total": steps // 2,
            "device_idle_seconds_total": 1.0 * steps,
            "device_seconds_total": 10.0 * steps,
            "jit_compiles_total": 0,
            "peak_memory_usage_gb": 12.5,
        }
        return {**super().server_info(), "internal_states": [counters]}


@pytest.fixture(scope="module")
def engine():
    return CountingEngine(step_s=STEP_S)


@pytest.fixture(scope="module")
def url(engine):
    with socket_server.serving(edge.make_state(engine)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def bench(url, tmp_path):
    """Runs `main` with a command line; returns (exit code, the result's lines)."""
    path = tmp_path / "result.jsonl"

    def run(line, *words, urls=(url,)):
        common = ["--base-url", *urls, "--output-file", str(path), "--disable-tqdm"]
        code = __main__.main([*common, *line.split(), *words])
        rows = path.read_text().splitlines() if path.exists() else []
        return code, [json.loads(row) for row in rows]

    return run


def test_a_line_of_sglang(bench, engine, capsys):
    engine.seen.clear()
    code, (row,) = bench(SGLANG)
    assert code == 0
    # A warm-up request of one step with each prompt, one that is timed alone, then the load; two
    # images each.
    assert [one.num_inference_steps for one in engine.seen] == 4 * [1] + 6 * [3]
    assert {(one.width, one.height) for one in engine.seen} == {(64, 32)}
    assert sorted(one.seed for one in engine.seen[6:]) == [3, 4, 5, 6]
    assert (row["completed_requests"], row["failed_requests"]) == (2, 0)
    assert (row["completed_outputs"], row["request_rate"]) == (4, 50)
    assert row["output_throughput"] == pytest.approx(2 * row["throughput_qps"])
    assert row["latency_p50"] >= 3 * STEP_S * 0.9
    assert (row["queue_mean"], row["denoise_p99"]) == (0.25, 2.0)
    assert (row["slo_attainment_rate"], row["slo_scale"]) == (1.0, 100)
    assert row["merged_step_fraction"] == pytest.approx(0.5)
    assert row["device_idle_fraction"] == pytest.approx(0.1)
    assert (row["jit_compiles"], row["peak_memory_mb_max"]) == (0, 12500)
    assert row["peak_memory_mb_mean"] == fake_images.PEAK_MEMORY_MB  # as each answer says
    shown = capsys.readouterr().out
    for label in ("Successful requests:", "P95 Latency (s):", "Share of merged steps:"):
        assert label in shown


def test_a_mixed_load_reaches_the_server_as_drawn(bench, engine):
    engine.seen.clear()
    code, (row,) = bench("--num-prompts 12 --max-concurrency 3", "--random-request-config", MIXED)
    assert (code, row["completed_requests"]) == (0, 12)
    load = Load(num_prompts=12, profiles=image_load.parse_profiles(MIXED))
    wanted = sorted((one.prompt, one.width, one.num_inference_steps) for one in load.asks())
    seen = engine.seen[6:]  # three warm-up requests of each kind
    assert wanted == sorted((one.prompt, one.width, one.num_inference_steps) for one in seen)
    assert row["max_concurrency"] == 3 and row["concurrency"] <= 3.01
    assert len({len(one.prompt) for one in seen}) > 6


def test_comparison_and_loads(bench, url, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    name = tmp_path / "plot"
    line = f"--num-prompts 4 --max-concurrency 4 --compare --loads 0.5,2 --plot-file {name}"
    code, rows = bench(line, urls=(url, url))
    assert code == 0
    assert [row["batching"] for row in rows] == [__main__.ON] * 3 + [__main__.OFF] * 3
    assert [row["load_share"] for row in rows] == [None, 0.5, 2] * 2
    rates = [row["request_rate"] for row in rows]
    assert rates[1] == pytest.approx(0.5 * rows[0]["throughput_qps"])
    assert rates[:3] == rates[3:] and rates[0] == "inf"
    assert {row["max_concurrency"] for row in rows if row["load_share"]} == {None}
    shown = capsys.readouterr().out
    assert "| load " in shown and "0.5 of capacity" in shown
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_prompts_of_a_file(bench, engine, tmp_path):
    path = tmp_path / "prompts"
    for text in ("a cat\n\na dog\n", '[{"prompt_en": "a cat"}, {"prompt_en": "a dog"}]'):
        path.write_text(text)
        engine.seen.clear()
        line = f"--dataset vbench --dataset-path {path} --num-prompts 3 --warmup-requests 0"
        assert bench(line)[0] == 0
        assert [one.prompt for one in engine.seen] == ["a cat", "a dog", "a cat"]


def test_failures_are_counted_and_told(bench, tmp_path, capsys):
    path = tmp_path / "prompts"
    path.write_text(f"a cat\n{fake_images.FAULT}\n")
    code, (row,) = bench(
        f"--dataset vbench --dataset-path {path} --num-prompts 2 --slo --slo-scale 1000"
    )
    assert (code, row["completed_requests"], row["failed_requests"]) == (0, 1, 1)
    assert row["slo_attainment_rate"] == 0.5  # a request that failed was not in time
    assert fake_images.FAULT_TEXT in row["first_error"]
    assert "1 requests failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--model other", 1, "does not serve 'other' but fake-image"),
        ("--dataset vbench", 2, "nothing is downloaded"),
        ("--dataset vbench --dataset-path /nowhere/p", 2, "cannot read --dataset-path"),
        ("--dataset-path p", 2, "--dataset-path is for --dataset vbench"),
        ("--width 64", 2, "both --width and --height"),
        ("--width 1000 --height 1000", 1, "the warm-up failed"),
        ("--fps 3", 2, "--fps is not supported"),
        ("--profile", 2, "--profile is not supported"),
        ("--slo-scale 3", 2, "--slo-scale needs --slo"),
        ("--compare", 2, "--compare needs two servers"),
        ("--loads 0.5 --request-rate 3", 2, "--loads chooses the rates"),
        ("--dtype float32", 2, "--dtype is for an engine in this process"),
        ("--model-path x", 2, "--base-url is for a server"),
        ("--random-request-config [1]", 2, "must be a JSON list of objects"),
        ('--random-request-config [{"ratio":1}]', 2, "ratio is called weight"),
        ('--random-request-config [{"weight":0}]', 2, "must be above 0"),
        ('--random-request-config [{"width":9}]', 2, "both width and height"),
        ('--random-request-config [{"num_inference_steps":0}]', 2, "must be a positive integer"),
        ('--random-request-config [{"weight":1e308},{"weight":1e308}]', 2, "not finite"),
        ('--random-request-config [{"weight":NaN}]', 2, "not valid JSON"),
        ('--extra-body {"guidance_scale":NaN}', 2, "--extra-body is not valid JSON"),
        ("--seed 99999999999999999999999", 2, "--seed 99999999999999999999999"),
        ("--request-rate 1e-30", 2, "raise --request-rate"),
        ("--output-file /nowhere/r", 2, "cannot write results to"),
        ('--extra-body {"no_such_field":1}', 1, "no_such_field"),
    ],
)
def test_errors_say_what_is_wrong(bench, line, code, message, capsys, tmp_path):
    (tmp_path / "result.jsonl").touch()
    found, _ = bench(line)
    assert message in capsys.readouterr().err
    assert found == code


def test_two_servers_need_compare(bench, url, capsys, tmp_path):
    (tmp_path / "result.jsonl").touch()
    assert bench("--num-prompts 1", urls=(url, url))[0] == 2
    assert "two servers only with --compare" in capsys.readouterr().err


def test_no_server(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert __main__.main(["--base-url", closed, "--ready-check-timeout-sec", "0"]) == 1
    assert f"no server at {closed}" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(bench, url, monkeypatch, capsys, tmp_path):
    (tmp_path / "result.jsonl").touch()
    monkeypatch.setattr(style, "matplotlib", None)
    assert bench("--compare", urls=(url, url))[0] == 2
    assert "pip install 'jdllm[plot]'" in capsys.readouterr().err
    assert bench("--num-prompts 1 --compare --plot-file=", urls=(url, url))[0] == 0


def test_in_process_as_the_server_does():
    asks = Load(
        num_prompts=4, count=2, width=96, height=96, num_inference_steps=2,
        extra={"guidance_scale": 0.0},
    ).asks()  # fmt: skip
    target = targets.InProcess(image_engine.shared())
    runs.warm_up(target, asks, counts=[1], steps=1)
    how = runs.Traffic(max_concurrency=2, show_progress=False)
    found = runs.measure(target, asks, how)
    assert (found["completed_requests"], found["completed_outputs"]) == (4, 8)
    assert found["denoising_steps"] == 16
    assert 0 < found["merged_step_fraction"] <= 1
    assert found["jit_compiles"] == 0
    parts = [found[f"{phase}_mean"] for phase in stats.PHASES]
    assert 0 < sum(parts) <= 1.05 * found["latency_mean"]
    wrong = [dataclasses.replace(asks[0], width=97, height=97)]
    with pytest.raises(command_line.BenchError, match="multiple of"):
        runs.measure(target, wrong, how)


class Compiling:
    """A target with programs in the making: so many are left each time that it is asked."""

    label = "compiling"

    def __init__(self, *left):
        self.left, self.seen, self.lock = list(left), [], threading.Lock()
        self.prompts = []

    def send(self, ask):
        with self.lock:
            self.seen.append((ask.width, ask.num_inference_steps, len(self.left)))
            self.prompts.append(ask.prompt)
        return stats.Record(start_s=0.0, end_s=1.0, images=1)

    def state(self):
        return {"num_waiting_compiles": self.left.pop(0) if self.left else 0}


def test_a_warm_up_runs_every_number_of_requests_with_the_programs_that_are_measured(monkeypatch):
    monkeypatch.setattr(runs, "POLL_S", 0.0)
    profiles = [
        Profile(width=side, height=side, num_inference_steps=steps)
        for side in (64, 96)
        for steps in (2, 8)
    ]
    asks = Load(num_prompts=40, profiles=tuple(profiles)).asks()
    target = Compiling(3, 1, 0)
    runs.warm_up(target, asks, counts=[1, 2, 4], steps=5)
    # Nothing is sent before the programs are there; kinds that differ in steps alone are one. Each
    # number is sent three times: with short, middle and long prompts.
    once = collections.Counter({(64, 5, 0): 21, (96, 5, 0): 21})
    assert collections.Counter(target.seen) == once
    # What the warm-up itself asked for is waited for, and then runs, too.
    target = Compiling(0, 2, 1, 0)
    runs.warm_up(target, asks, counts=[1, 2, 4], steps=5)
    assert collections.Counter(target.seen) == collections.Counter(
        {(side, 5, left): 21 for side in (64, 96) for left in (3, 0)}
    )


def test_a_warm_up_has_captions_of_all_lengths_and_keeps_none_of_the_load(monkeypatch):
    monkeypatch.setattr(runs, "POLL_S", 0.0)
    asks = Load(num_prompts=40, width=64, height=64).asks()
    target = Compiling(0, 2, 0)
    runs.warm_up(target, asks, counts=[1, 4], steps=5)
    texts = sorted({ask.prompt for ask in asks}, key=lambda text: (len(text), text))
    middle = len(texts) // 2
    # Twice, as programs were compiled meanwhile: one and four of the shortest, and so on.
    assert len(set(target.prompts)) == len(target.prompts) == 2 * 3 * (1 + 4)
    assert not set(texts) & set(target.prompts)
    sent = collections.Counter(prompt.rpartition(" ")[0] for prompt in target.prompts)
    assert sent[texts[0]] == sent[texts[-1]] == 2 * 2
    assert sum(map(sent.__getitem__, texts[:4])) == sum(map(sent.__getitem__, texts[-4:])) == 2 * 5
    assert sum(map(sent.__getitem__, texts[middle - 3 : middle + 3])) == 2 * 5
    # A load of one prompt has one length.
    runs.warm_up(target, asks[:1], counts=[2], steps=5)
    assert [prompt.rpartition(" ")[0] for prompt in target.prompts[30:]] == 2 * [asks[0].prompt]


def test_a_warm_up_says_when_programs_are_never_there(monkeypatch):
    monkeypatch.setattr(runs, "POLL_S", 0.0)
    monkeypatch.setattr(runs, "COMPILE_LIMIT_S", 0.0)
    asks = Load(num_prompts=1, width=64, height=64).asks()
    with pytest.raises(command_line.BenchError, match="5 programs"):
        runs.warm_up(Compiling(*[5] * 99), asks, counts=[1], steps=1)


def test_the_report_warms_every_number_of_rows_that_it_measures(monkeypatch):
    report = load_script("bench_images_report.py", monkeypatch)
    assert report.row_counts([1, 4, 12, 4, 12]) == [1, 2, 4, 8, 12]
    assert report.row_counts([3]) == [1, 2, 3]


def test_fields_in_process_are_checked():
    targets.check_fields({"guidance_scale": 1.0})
    with pytest.raises(errors.ConfigError, match="did you mean 'guidance_scale'"):
        targets.check_fields({"guidance_scal": 1.0})


def test_headers_are_those_of_the_text_benchmark_and_only_for_servers():
    options = image_options.parse(["--api-key", "k", "--header", "A=1", "B=2=3"])
    found = server_flags.headers(options)
    assert found == {"A": "1", "B": "2=3", "Authorization": "Bearer k"}
    with pytest.raises(errors.ConfigError, match="--header is for a server"):
        image_options.check(image_options.parse(["--model-path", "m", "--header", "A=1"]))


def test_in_process_flags_are_those_of_the_server():
    line = "--model-path m --batching-max-size 4 --warmup-resolutions 64x64 96x96 --compare"
    options = image_options.parse([*line.split(), "--max-image-pixels", "9216"])
    image_options.check(options)
    on, off = __main__.variants(options, [])
    assert (on[0], off[0]) == (__main__.ON, __main__.OFF)
    with pytest.raises(errors.ConfigError, match="compares nothing"):
        image_options.check(
            image_options.parse(["--model-path", "m", "--batching-max-size", "1", "--compare"])
        )


def test_percentiles_and_slos_by_hand():
    records = [stats.Record(start_s=0, end_s=s, images=2, steps=8, slo_s=2.5) for s in (1, 2, 3, 4)]
    found = stats.summarize(records, 4.0)
    assert (found["latency_mean"], found["latency_p50"], found["latency_median"]) == (2.5, 2.5, 2.5)
    assert found["latency_p90"] == pytest.approx(3.7)
    assert (found["throughput_qps"], found["output_throughput"]) == (1.0, 2.0)
    assert (found["step_throughput"], found["concurrency"]) == (8.0, 2.5)
    assert (found["slo_attainment_rate"], found["slo_met_success"]) == (0.5, 2)
