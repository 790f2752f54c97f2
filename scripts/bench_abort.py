"""Times an abort, with launches that the host can end and with launches that it cannot end.

    python scripts/bench_abort.py --model-path configs/llada2.0-mini --load-format dummy

Requests that write one token a forward fill the rows; at a random moment all are aborted. When
`abort` returns, their slots and pages are free.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from jdllm.bench import in_process
from jdllm.engine.engine import Engine
from jdllm.options import config


def main() -> None:
    """Parses the command line, measures both kinds of launches, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--num-continuous-decode-steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    out = sys.stdout.write
    engine_config = config.EngineConfig(
        model_path=args.model_path,
        load_format=args.load_format,
        context_length=args.input_len + 1024,
        max_running_requests=args.batch_size,
        num_continuous_decode_steps=args.num_continuous_decode_steps,
        skip_tokenizer_init=True,
        log_level="warning",
    )
    with in_process.open_engine(engine_config) as engine:
        out(f"{in_process.headline(in_process.surroundings(engine))}\n")
        runner = engine._built.runner
        interrupt = runner.interrupt
        for name, used in (("the host ends launches", interrupt), ("it waits", lambda: None)):
            runner.interrupt = used
            times = [measure(engine, args, seed) for seed in range(args.repeats + 1)][1:]
            out(
                f"{name:24s} abort ms: median {statistics.median(times):.1f}, "
                f"most {max(times):.1f}\n"
            )


def measure(engine: Engine, args: argparse.Namespace, seed: int) -> float:
    """Returns the milliseconds that one abort of all rows took."""
    rng = np.random.default_rng(seed)
    prompts = in_process.random_ids(rng, engine, args.batch_size, args.input_len)
    params = {
        "max_new_tokens": 1024,
        "temperature": 0.0,
        "ignore_eos": True,
        "dllm": {"threshold": 0.95},
    }
    stream = engine.generate(input_ids=prompts, sampling_params=params, stream=True)
    for _ in range(args.batch_size):  # until decode is under way
        next(stream)
    time.sleep(rng.uniform(0.0, 0.5))
    began = time.perf_counter()
    engine.abort(abort_all=True)
    taken = (time.perf_counter() - began) * 1e3
    stream.close()
    return taken


if __name__ == "__main__":
    main()
