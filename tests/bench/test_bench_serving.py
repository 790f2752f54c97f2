"""The load generator against a server process around the fake engine: real sockets.

The fake engine commits blocks of 4 tokens at a known pace, 2 forwards a block.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from jdllm.bench import serving

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
BLOCK, BLOCK_S, WAIT_S = 4, 0.03, 30.0
# The server's timers count whole milliseconds and may be early by one.
NO_SOONER = 0.95
IDS = "--dataset-name random-ids --tokenize-prompt --vocab-size 250"
# Keys of a line of SGLang's bench_serving (python/sglang/benchmark/serving.py).
SGLANG_KEYS = """tag backend dataset_name request_rate max_concurrency sharegpt_output_len
random_input_len random_output_len random_range_ratio server_info duration completed
total_input_tokens total_output_tokens total_output_tokens_retokenized request_throughput
input_throughput output_throughput total_throughput concurrency max_output_tokens_per_s
max_concurrent_requests"""
SGLANG_LATENCIES = [
    f"{figure}_{name}_ms"
    for name in ("e2e_latency", "ttft", "tpot", "itl")
    for figure in ("mean", "median", "std", "p90", "p95", "p99")
]
SGLANG_ROWS = """Backend: Traffic request rate: Max request concurrency: Successful requests:
Benchmark duration (s): Total input tokens: Total generated tokens: Request throughput (req/s):
Input token throughput (tok/s): Output token throughput (tok/s): Total token throughput (tok/s):
Peak output token throughput (tok/s): Peak concurrent requests: Concurrency:
Mean E2E Latency (ms): Median E2E Latency (ms): P90 E2E Latency (ms): P99 E2E Latency (ms):
Mean TTFT (ms): Median TTFT (ms): P99 TTFT (ms): Mean TPOT (ms): Mean ITL (ms): Median ITL (ms):
P95 ITL (ms): P99 ITL (ms): Max ITL (ms):"""


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "support.fake_server", str(port), "5", str(BLOCK_S)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT, env=PATH)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(address + "/health", timeout=5).status == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bench(url, tmp_path):
    """Runs `main` with a command line; returns (exit code, the result's lines)."""
    path = tmp_path / "result.jsonl"

    def run(line, *words):
        common = ["--base-url", url, "--output-file", str(path), "--disable-tqdm"]
        code = serving.main([*common, *line.split(), *words])
        rows = path.read_text().splitlines() if path.exists() else []
        return code, [json.loads(row) for row in rows]

    return run


def prompt_file(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "p" * (i + 2), "max_tokens": 4 * i + 1} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("backend", ["jdllm", "sglang", "sglang-oai", "sglang-oai-chat"])
@pytest.mark.parametrize("stream", ["", "--disable-stream"])
def test_counts_are_exact_on_every_route(bench, tmp_path, backend, stream, capsys):
    line = f"--backend {backend} --dataset-name custom {stream} --output-details --num-prompts 6"
    code, (row,) = bench(line, "--dataset-path", prompt_file(tmp_path))
    assert code == 0
    assert {*SGLANG_KEYS.split(), *SGLANG_LATENCIES} <= set(row)
    assert (row["backend"], row["completed"], row["failed"]) == (backend, 6, 0)
    wanted = [4 * i + 1 for i in range(6)]
    assert sorted(row["output_lens"]) == wanted
    template = len("<user>") if backend.endswith("chat") else 0
    assert row["total_input_tokens"] == sum(i + 2 + template for i in range(6))
    assert row["blocks"] == [n // BLOCK + 1 for n in row["output_lens"]]
    assert row["nfes"] == [2 * blocks for blocks in row["blocks"]]
    assert row["tpf"] == pytest.approx(sum(wanted) / sum(row["nfes"]))
    assert row["errors"] == [""] * 6
    texts = zip(row["generated_texts"], row["output_lens"], strict=True)
    assert all(len(text) == count for text, count in texts)
    assert row["total_cached_tokens"] == 12
    told = ("ttfts", "itls", "e2e_latencies", "blocks", "output_lens")
    for ttft, gaps, latency, blocks, count in zip(*(row[key] for key in told), strict=True):
        assert NO_SOONER * BLOCK_S * (blocks if stream else 1) <= ttft <= latency
        assert NO_SOONER * BLOCK_S * blocks <= latency
        # A loaded machine may deliver several blocks together, never a part of one.
        first = count - len(gaps)
        assert first == count or (not stream and first > 0 and first % BLOCK == 0)
        assert ttft + sum(gaps) <= latency + 1e-6
        assert latency <= row["duration"]
    if stream:
        assert row["mean_itl_ms"] is None
    else:
        gaps = [gap for found in row["itls"] for gap in found]
        assert row["mean_itl_ms"] == pytest.approx(1e3 * sum(gaps) / len(gaps))
        assert row["mean_itl_ms"] < row["mean_inter_block_latency_ms"]
        assert row["mean_ttft_ms"] == pytest.approx(1e3 * sum(row["ttfts"]) / 6)
        assert row["mean_ttft_ms"] < row["mean_e2e_latency_ms"]
    shown = capsys.readouterr().out
    assert "Serving Benchmark Result" in shown
    if not stream:
        labels = SGLANG_ROWS.replace("\n", " ").removesuffix(":").split(": ")
        assert [label for label in labels if f"{label}:" not in shown] == []


def test_load_options(bench, capsys):
    line = f"{IDS} --num-prompts 8 --random-input 9 --random-output 8 --random-range-ratio 1"
    code, rows = bench(f"{line} --max-concurrency 2 --flush-cache --cache-report --tag one")
    assert code == 0
    assert rows[0]["duration"] >= NO_SOONER * 4 * 2 * BLOCK_S
    assert rows[0]["concurrency"] <= 2
    assert rows[0]["total_input_tokens"] == 72
    assert rows[0]["cache_hit_rate_pct"] == pytest.approx(100 * 16 / 72)
    assert (rows[0]["tag"], rows[0]["request_rate"]) == ("one", "inf")
    assert "Cache hit rate (%):" in capsys.readouterr().out
    code, rows = bench(f"{line} --request-rate 40 --warmup-requests 0")
    assert (code, rows[1]["request_rate"]) == (0, 40)
    assert rows[1]["duration"] > 2 * BLOCK_S
    assert rows[1]["max_concurrency"] is None


def test_options_reach_the_server(bench):
    line = f"{IDS} --num-prompts 1 --random-input 5 --random-output 99 --random-range-ratio 1"
    extra = '{"sampling_params": {"max_new_tokens": 7}}'
    code, (row,) = bench(line, "--extra-request-body", extra, "--dllm", "threshold=0.5")
    assert (code, row["total_output_tokens"]) == (0, 7)
    code, _ = bench(line, "--extra-request-body", '{"no_such_field": 1}')
    assert code == 1


def test_some_failures_are_counted_and_told(bench, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "fits", "max_tokens": 8}, {"prompt": "long", "max_tokens": 9999}]
    path.write_text("\n".join(map(json.dumps, rows)))
    line = f"--dataset-name openai --num-prompts 2 --output-details --dataset-path {path}"
    code, (row,) = bench(line)
    assert (code, row["completed"], row["failed"]) == (0, 1, 1)
    assert row["total_output_tokens"] == 8
    assert "maximum context" in row["errors"][1]
    captured = capsys.readouterr()
    assert "Failed requests:" in captured.out
    assert "1 requests failed" in captured.err


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (f"{IDS} --model other", 1, "does not serve 'other' but fake-model"),
        (f"{IDS} --random-input 600 --random-range-ratio 1", 1, "maximum context length is 512"),
        (f"{IDS} --random-input 600 --random-range-ratio 1 --warmup-requests 0", 1, "all 1 requ"),
        (f"{IDS} --backend sglang-oai-chat", 2, "--tokenize-prompt does not go with --backend"),
        (f"{IDS} --backend vllm --flush-cache", 2, "--flush-cache does not go with"),
        ("--dataset-name random --vocab-size 9", 2, "--vocab-size is for"),
        (f"{IDS} --header broken", 2, "--header 'broken' is not KEY=VALUE"),
        (f"{IDS} --dllm threshold=-1", 2, "dllm.threshold"),
        (f"{IDS} --temperature -1", 2, "temperature"),
        ("--dataset-name custom --dataset-path /nowhere/p", 2, "cannot read --dataset-path"),
        ("--tokenizer /nowhere/model", 2, "no usable tokenizer at /nowhere/model"),
        (f"{IDS} --output-file /nowhere/r", 2, "cannot write results to '/nowhere/r'"),
        (f"{IDS} --base-url ftp://x", 2, "must look like http://"),
    ],
)
def test_errors_say_what_is_wrong(bench, line, code, message, capsys, tmp_path):
    (tmp_path / "result.jsonl").touch()
    found, _ = bench(f"--num-prompts 1 {line}")
    assert message in capsys.readouterr().err
    assert found == code


def test_no_server(bench, tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, _ = bench(f"{IDS} --base-url {closed} --ready-check-timeout-sec 0")
    assert code == 1
    assert f"no server at {closed}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_runs_as_a_module(url, tmp_path):
    command = [sys.executable, "-m", "jdllm.bench.serving", "--base-url", url, "--num-prompts=2"]
    command += [*IDS.split(), "--random-output=8", "--output-file", str(tmp_path / "r.jsonl")]
    command += ["--random-input=20"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "Successful requests:                     2" in done.stdout
    assert "2/2" in done.stderr  # the progress bar
