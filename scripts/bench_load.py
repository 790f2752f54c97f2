"""Times loading one checkpoint: conversion from safetensors against restoring the Orbax copy.

    python scripts/bench_load.py --config configs/llada2.0-mini/config.json --work-dir /tmp/w

Writes random weights of the config's shapes (cut to `--layers` layers) as HF safetensors,
converts them with `jdllm.convert`, then loads each form several times, alternating. Files
are in the page cache, so this compares host work, not disks.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import jax

from jdllm import convert
from jdllm.models import loading


def main() -> None:
    """Parses the command line, writes both forms, prints seconds per load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--work-dir", type=pathlib.Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    source, converted = args.work_dir / "safetensors", args.work_dir / "orbax"
    source.mkdir(parents=True)
    hf_config = json.loads(args.config.read_text()) | {"num_hidden_layers": args.layers}
    (source / "config.json").write_text(json.dumps(hf_config))
    model = loading.load(source, dtype="bfloat16", load_format="dummy", show_progress=False)
    weights = source / "model.safetensors"
    loading.export_safetensors(model.spec.architecture, model.config, model.params, weights)
    del model
    convert.convert(source, converted, dtype="bfloat16", show_progress=False)
    out = sys.stdout.write
    out(f"# {' '.join(sys.argv)}\n# {jax.local_devices()[0].device_kind}, jax {jax.__version__}, ")
    out(f"{weights.stat().st_size / 1e9:.2f} GB\n")
    for _ in range(args.repeats):
        for name, directory in (("safetensors", source), ("orbax", converted)):
            began = time.monotonic()
            model = loading.load(directory, dtype="bfloat16", show_progress=False)
            jax.block_until_ready(model.params)
            out(f"{name:12s} {time.monotonic() - began:6.2f} s\n")
            del model


if __name__ == "__main__":
    main()
