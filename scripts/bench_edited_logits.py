"""What a launch with logits costs: plain rows beside rows that ask for logprobs or a penalty.

    python scripts/bench_edited_logits.py --model-path configs/llada2.0-mini --load-format dummy

Each line is one closed batch through the real engine (greedy, all arrive at once, EOS ignored),
the median of `--repeats` runs after a warm-up. Rows that ask for nothing run programs without
logits; the log says how long the programs with logits took to compile.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from jdllm.bench import command_line, in_process, one_batch, tables
from jdllm.options import sampling_params

ASKED = {
    "plain": {},
    "logprobs": {"return_logprob": True, "top_logprobs": 5},
    "penalty": {"frequency_penalty": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 64], metavar="N")
    parser.add_argument("--input-len", type=int, nargs=1, default=[512])
    parser.add_argument("--output-len", type=int, nargs=1, default=[256])
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.95, 0.0], metavar="P")
    parser.add_argument("--repeats", type=int, default=3)
    command_line.add_engine_flags(parser)
    options = parser.parse_args()
    config = one_batch.engine_config(options)
    (input_len,), (output_len,) = options.input_len, options.output_len
    rng = np.random.default_rng(0)
    with in_process.open_engine(config) as engine:
        tables.say("threshold  rows  asked     out tok/s  of plain")
        for threshold in options.threshold:
            for rows in options.batch_size:
                ids = in_process.random_ids(rng, engine, rows, input_len)
                plain = None
                for name, asked in ASKED.items():
                    params = sampling_params.SamplingParams(
                        max_new_tokens=output_len,
                        temperature=0.0,
                        ignore_eos=True,
                        dllm=sampling_params.DllmParams.from_mapping({"threshold": threshold}),
                        **asked,
                    )
                    speeds = []
                    for _ in range(1 + options.repeats):
                        records, seconds = in_process.generate(engine, ids, [params] * rows)
                        failed = [one.error for one in records if one.error is not None]
                        if failed:
                            raise SystemExit(f"{len(failed)} requests failed; {failed[0]}")
                        tokens = sum(one.completion_tokens for one in records)
                        speeds.append(tokens / seconds)
                    speed = statistics.median(speeds[1:])
                    plain = plain or speed
                    tables.say(
                        f"{threshold:9g}  {rows:4d}  {name:8s}  {speed:9.0f}  {speed / plain:8.1%}"
                    )


if __name__ == "__main__":
    main()
