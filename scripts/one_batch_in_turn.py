"""`jdllm bench one-batch` beside others on the same GPUs: all compile together, measure in turn.

    python scripts/one_batch_in_turn.py FOLDER NUMBER OF --model-path ... --tp-size 4

Compiling takes minutes in which the GPUs idle. So OF such processes start together, NUMBER counts
them from 0, and FOLDER is where they meet: each leaves a file there when its engine is ready, waits
until all are, and measures when those before it have ended. Whoever starts them leaves the files of
one that has ended (`bench_models.py` does). Each must be given its share of the GPUs' memory
(`XLA_PYTHON_CLIENT_MEM_FRACTION`).
"""

from __future__ import annotations

import pathlib
import sys
import time

from jdllm.bench import in_process, one_batch

READY, DONE = "ready", "done"  # of files
POLL_S = 0.2


def main() -> None:
    folder, number, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options, began = one_batch.parse_args(sys.argv[4:]), time.monotonic()
    one_batch.check(options)
    with in_process.open_engine(one_batch.engine_config(options)) as engine:
        sys.stdout.write(f"# ready after {time.monotonic() - began:.0f} s\n")
        (folder / f"{READY}-{number}").touch()
        wait_for([folder / f"{READY}-{other}" for other in range(count)])
        wait_for([folder / f"{DONE}-{other}" for other in range(number)])
        one_batch.run_on(engine, options)


def wait_for(files: list[pathlib.Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
