"""The three benchmarks around one real engine over the tiny checkpoint (random weights, block 8).

The engine is built once, by the flags of `one_batch`; `serving` asks it over HTTP.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
import uvicorn
from support import tiny_engine

from jdllm.bench import in_process, offline_throughput, one_batch, serving
from jdllm.engine.start import startup
from jdllm.options import config
from jdllm.server import app, state

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile

FLAGS = [
    f"--model-path={tiny_engine.GOLDEN}",
    "--page-size=8",
    "--chunked-prefill-size=8",
    "--disable-fused-commit",
    "--disable-tqdm",
]
LENGTHS = ["--batch-size", "1", "2", "--input-len", "16", "--output-len", "24"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    blocks = tmp_path_factory.mktemp("bench") / "blocks.yaml"
    blocks.write_text(f"block_size: {tiny_engine.BLOCK}\n")
    FLAGS.append(f"--dllm-algorithm-config={blocks}")
    options = one_batch.parse_args([*FLAGS, *LENGTHS, "--context-length", "40"])
    with in_process.open_engine(one_batch.engine_config(options)) as running:
        yield running
    FLAGS.pop()


@pytest.fixture
def bench(engine, monkeypatch):
    """`main` of a benchmark in process, given the running engine instead of a new one."""
    asked = []

    def lend(engine_config):
        asked.append(engine_config)
        return contextlib.nullcontext(engine)

    monkeypatch.setattr(in_process, "open_engine", lend)
    return asked


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_batch_measures_every_combination(bench, engine, tmp_path, capsys):
    path = tmp_path / "result.jsonl"
    argv = [*FLAGS, *LENGTHS, "--threshold", "1", "0", "--run-name", "tiny", "--repeats", "3"]
    assert one_batch.main([*argv, "--result-filename", str(path)]) == 0
    assert (bench[0].max_running_requests, bench[0].skip_tokenizer_init) == (2, True)
    rows = read(path)
    assert [(row["threshold"], row["batch_size"]) for row in rows] == [
        (1, 1),
        (1, 2),
        (0, 1),
        (0, 2),
    ]
    for row in rows:
        assert (row["run_name"], row["input_len"], row["output_len"]) == ("tiny", 16, 24)
        assert row["prefill_latency"] > 0
        latency = row["median_decode_latency"]
        if latency is None:  # of whole blocks a run may seem no longer than its prefill
            assert row["threshold"] == 0 and row["total_latency"] <= row["prefill_latency"]
            assert row["median_decode_throughput"] is None
        else:
            assert 0 < latency < row["total_latency"]
        assert row["total_latency"] == sorted(row["total_latencies"])[1]
        size = row["batch_size"]
        assert row["output_throughput"] == pytest.approx(24 * size / row["total_latency"])
        assert row["overall_throughput"] == pytest.approx(40 * size / row["total_latency"])
        assert row["prefill_throughput"] == pytest.approx(16 * size / row["prefill_latency"])
        assert row["blocks_total"] == 3 * size
        assert row["jit_compiles"] == 0
        assert row["device"].startswith(("cpu", "gpu"))
        assert "jax" in row["versions"]
        assert row["engine"]["block_size"] == tiny_engine.BLOCK
        assert len(row["distinct_experts"]) == 2
        assert all(1 <= count <= 32 for count in row["distinct_experts"])
    # Confidence is never above 1: one token a forward. It is always above 0: a whole block.
    assert rows[0]["mean_nfe"] >= 24
    assert rows[0]["tpf"] <= 1.0
    assert rows[2]["mean_nfe"] <= 2 * 3
    assert rows[2]["tpf"] >= 4.0
    text = capsys.readouterr().out
    assert "Prefill. latency:" in text
    assert "Decode.  median latency:" in text
    assert "Total. latency:" in text
    assert "distinct experts per layer" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "3"], "--batch-size 3 exceeds --max-running-requests 2"),
        (["--threshold", "1", "--dllm", "threshold=0"], "give one"),
        (["--dllm", "edit_threshold=0"], "LowConfidence has no option 'edit_threshold'"),
        (["--result-filename", "/nowhere/r"], "cannot write results to '/nowhere/r'"),
        (["--input-len", "30", "--output-len", "20"], "40"),
    ],
)
def test_one_batch_refuses_what_cannot_be(bench, argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert one_batch.main([*FLAGS, *argv]) == 2
    assert message in capsys.readouterr().err


def test_offline_throughput_has_sglangs_fields(bench, tmp_path, capsys):
    path = tmp_path / "result.jsonl"
    dataset = "--dataset-name random-ids --num-prompts 5 --random-input 16 --random-output 24"
    argv = [*FLAGS, *dataset.split(), "--dllm", "threshold=0.3", "--result-filename", str(path)]
    assert offline_throughput.main([*argv, "--skip-tokenizer-init"]) == 0
    assert offline_throughput.main([*argv, "--skip-tokenizer-init", "--skip-warmup"]) == 0
    first, second = read(path)
    assert first["backend"] == "engine"
    assert first["successful_requests"] == 5
    for name in ("total_input_tokens", "total_output_tokens", "sampling_params", "blocks_total"):
        assert first[name] == second[name]
    for row in (first, second):
        wall = row["total_latency"]
        assert row["output_throughput"] == pytest.approx(row["total_output_tokens"] / wall)
        assert row["input_throughput"] == pytest.approx(row["total_input_tokens"] / wall)
        assert row["request_throughput"] == pytest.approx(5 / wall)
        assert row["tpf"] == pytest.approx(row["total_output_tokens"] / row["nfe_total"])
        assert 0 < row["median_ttft_ms"] <= row["median_e2e_latency_ms"] <= 1e3 * wall
        assert row["last_gen_throughput"] >= 0
    text = capsys.readouterr().out
    assert "Offline Throughput Benchmark Result" in text
    assert "Output token throughput (tok/s):" in text


def test_offline_throughput_reads_ids_from_a_file(bench, tmp_path):
    data, path = tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    data.write_text(
        '{"input_ids": [3, 4, 5], "output_len": 9}\n{"input_ids": [6], "output_len": 2}'
    )
    argv = [*FLAGS, "--dataset-name", "custom", "--dataset-path", str(data), "--skip-warmup"]
    assert offline_throughput.main([*argv, "--result-filename", str(path)]) == 0
    (row,) = read(path)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (4, 11)


def test_text_without_a_tokenizer_is_refused_by_name(bench, capsys):
    assert offline_throughput.main([*FLAGS, "--num-prompts", "1"]) == 2
    assert "use --dataset-name random-ids" in capsys.readouterr().err


def test_a_wrong_model_path_is_a_clear_error(capsys, tmp_path):
    argv = ["--model-path", str(tmp_path / "none"), "--load-format", "dummy"]
    assert one_batch.main([*argv, "--result-filename", ""]) == 2
    assert "none" in capsys.readouterr().err


@pytest.fixture
def url(engine):
    """The real HTTP edge around the engine, on a free port."""
    server_state = state.ServerState(
        server_config=config.ServerConfig(), progress=startup.StartupProgress()
    )
    server_state.loaded_engine, server_state.phase = engine, "ready"
    server = uvicorn.Server(
        uvicorn.Config(app.create_app(server_state), port=0, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


def test_serving_streams_from_the_real_engine(url, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    argv = (
        "--dataset-name random-ids --tokenize-prompt --vocab-size 300 --num-prompts 6 "
        "--random-input 16 --random-output 24 --dllm threshold=0 --max-concurrency 3 "
        f"--flush-cache --disable-tqdm --output-details --base-url {url} --output-file {path}"
    )
    assert serving.main(argv.split()) == 0
    (row,) = read(path)
    assert (row["completed"], row["failed"]) == (6, 0)
    assert row["total_output_tokens"] == sum(row["output_lens"])
    assert row["total_input_tokens"] == sum(row["input_lens"])
    assert row["blocks_total"] >= 6
    assert row["tpf"] == pytest.approx(row["total_output_tokens"] / sum(row["nfes"]))
    assert row["prefill_launches"] >= 1
    assert row["jit_compiles"] == 0
    assert row["server_info"]["block_size"] == tiny_engine.BLOCK
    assert "Mean NFE per request:" in capsys.readouterr().out
