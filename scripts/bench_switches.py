"""What overlap, multi-step launches and fused commit bring: one load, each switched off in turn.

    python scripts/bench_switches.py -- --model-path configs/llada2.0-mini --load-format dummy

For every variant a server is started with the flags after `--` and the variant's own; each
threshold's load goes to it through `jdllm.bench.serving`, over HTTP: random token ids of random
lengths, arriving at random. Prints one row per variant and threshold, results in full go to
`--output-file`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

VARIANTS: dict[str, list[str]] = {
    "default": [],
    "no overlap": ["--disable-overlap-schedule"],
    "one step a launch": ["--num-continuous-decode-steps", "1"],
    "no fused commit": ["--disable-fused-commit"],
}
# Heading, key of the result, format.
COLUMNS = (
    ("out tok/s", "output_throughput", "9.1f"),
    ("TTFT ms p50", "median_ttft_ms", "11.0f"),
    ("p99", "p99_ttft_ms", "6.0f"),
    ("E2E ms p50", "median_e2e_latency_ms", "10.0f"),
    ("p99", "p99_e2e_latency_ms", "6.0f"),
    ("TPOT ms p50", "median_tpot_ms", "11.2f"),
    ("NFE", "mean_nfe", "6.1f"),
    ("forwards", "forwards", "8d"),
    ("tok/fwd", "tokens_per_forward", "7.1f"),
    ("padding", "padding_fraction", "7.1%"),
    ("idle", "device_idle_fraction", "6.2%"),
    ("preempted", "preemptions", "9d"),
    ("compiles", "jit_compiles", "8d"),
    ("failed", "failed", "6d"),
)


def main() -> None:
    """Parses the command line, runs every variant, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--thresholds", nargs="+", default=["0.95", "0"])
    parser.add_argument("--num-prompts", default="256")
    parser.add_argument("--input-len", default="4096", help="most prompt tokens")
    parser.add_argument("--output-len", default="1024", help="most new tokens")
    parser.add_argument("--range-ratio", default="0.004", help="fewest over most")
    parser.add_argument("--request-rate", default="16", help="requests per second, Poisson")
    parser.add_argument("--vocab-size", default="157184")
    parser.add_argument("--port", default="30998")
    parser.add_argument("--output-file", help="JSON lines")
    parser.add_argument("flags", nargs="*", help="flags of jdllm.serve, after --")
    args = parser.parse_args()
    out = sys.stdout.write
    out(f"# {' '.join(sys.argv)}\n")
    out(f"{'variant':18s} thresh " + " ".join(_head(column) for column in COLUMNS) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(args.output_file or pathlib.Path(folder) / "results.jsonl")
        for variant in args.variants:
            log = pathlib.Path(folder) / "server.log"
            with log.open("w") as sink:
                began = time.monotonic()
                command = [sys.executable, "-m", "jdllm.serve", "--port", args.port, *args.flags]
                server = subprocess.Popen([*command, *VARIANTS[variant]], stdout=sink, stderr=sink)
                try:
                    for threshold in args.thresholds:
                        row = load(args, variant, threshold, path)
                        out(f"{variant:18s} {threshold:>6s} {row}\n")
                        sys.stdout.flush()
                    out(f"  {time.monotonic() - began:.0f} s with start-up\n")
                except subprocess.CalledProcessError:
                    sys.stderr.write(log.read_text()[-2000:])
                    raise
                finally:
                    server.terminate()
                    server.wait(timeout=60)


def load(args: argparse.Namespace, variant: str, threshold: str, path: pathlib.Path) -> str:
    """Waits for the server, sends one load; returns its row of the table."""
    command = [
        *(sys.executable, "-m", "jdllm.bench.serving", "--port", args.port),
        *("--ready-check-timeout-sec", "600", "--dataset-name", "random-ids", "--tokenize-prompt"),
        *("--vocab-size", args.vocab_size, "--num-prompts", args.num_prompts),
        *("--random-input-len", args.input_len, "--random-output-len", args.output_len),
        *("--random-range-ratio", args.range_ratio, "--request-rate", args.request_rate),
        *("--dllm", f"threshold={threshold}", "--output-file", str(path), "--disable-tqdm"),
        *("--tag", variant),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(path.read_text().splitlines()[-1])
    return " ".join(_cell(column, result) for column in COLUMNS)


def _head(column: tuple[str, str, str]) -> str:
    name, _, form = column
    return f"{name:>{form.partition('.')[0].rstrip('d')}s}"


def _cell(column: tuple[str, str, str], result: dict) -> str:
    _, key, form = column
    value = result[key]
    return _head(("-", key, form)) if value is None else format(value, form)


if __name__ == "__main__":
    main()
