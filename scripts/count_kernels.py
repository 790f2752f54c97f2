"""Counts the kernels of a launch's loops, compiled for an H200 without one.

    python scripts/count_kernels.py --model-path configs/llada-8b --rows 1
    python scripts/count_kernels.py --model-path configs/llada2.0-mini --rows 4 --list

Inside a CUDA graph each small kernel costs 1 to 2 us, so the kernels of a step's rules are worth
counting. The script needs jax with its CUDA plugin (`pip install "jax[cuda13]"`), but no GPU.
Without one XLA picks GEMMs without timing them; everything else is what a GPU gets. The model has
`--layers` layers and its real vocabulary and widths.

The script prints the tree of loops: a launch's outer loop, inside it a loop for each compiled size,
and inside these the passes over the vocabulary. For each loop it counts the kernels and copies of
the condition and of the body, without those of inner loops.

Before it stands whether the launch is one CUDA graph. Where it is not, the host starts the rounds
of the outer loops, which the GPU waits for, and what XLA could not make part of a graph is listed:
a copy of a slice that moves with a loop, for one.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (after the platform is set)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from jdllm import algorithms, device_facts  # noqa: E402
from jdllm.engine.build import kinds  # noqa: E402
from jdllm.kv_cache import pool as pool_lib  # noqa: E402
from jdllm.models import loading, registry  # noqa: E402
from jdllm.runner import config as runner_config  # noqa: E402
from jdllm.runner.launch import executables, interrupts  # noqa: E402
from jdllm.runner.launch import words as words_lib  # noqa: E402
from jdllm.scheduler import batch as batch_lib  # noqa: E402
from jdllm.scheduler.rows import interface  # noqa: E402
from pallas_kernels import device  # noqa: E402

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""
GPU = device_facts.DeviceFacts(platform="gpu", device_kind="NVIDIA H200")
PAGE = 64
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}


def launch_of(args: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """Returns a launch as a function, and the shapes of its arguments."""
    config = json.loads((pathlib.Path(args.model_path) / "config.json").read_text())
    for one in (config, config.get("text_config", {})):
        names = {"num_hidden_layers", "n_layers"} & one.keys()  # a family has one of them
        one |= dict.fromkeys(names, args.layers)
        if "layer_types" in one:  # the last ones: DiffusionGemma ends with a layer of each type
            one["layer_types"] = one["layer_types"][-args.layers :]
    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / "config.json").write_text(json.dumps(config))
        parsed = loading.read_config(directory)
    graphdef, params = registry.family(parsed.spec.architecture).abstract(
        parsed, dtype=jnp.bfloat16, hash_embedding_positions=True
    )
    bfloat16 = jnp.dtype(jnp.bfloat16)
    params = jax.eval_shape(lambda params: loading.serving_params(params, bfloat16), params)
    spec, R, length = parsed.spec, args.rows, args.context_length
    kind = kinds.kind_of(spec)
    assert spec.diffusion.kind is not None, "kind_of refuses a family without rows"
    pool = pool_lib.PoolConfig(
        num_pages=-(-length // PAGE) * R,
        page_size=PAGE,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype="bfloat16",
        kv_heads_of_layers=spec.kv_heads_of_layers,
    )
    config = runner_config.StepConfig(
        spec=spec,
        pool=pool,
        context_length=length,
        num_slots=R,
        algorithms=tuple(
            (args.dllm_algorithm or next(iter(algorithms.of_kind(spec.diffusion.kind)))).split(",")
        ),
        max_launch_steps=4,
    )
    built = kind.device(graphdef, config, GPU)
    rows = kind.rows.build(
        interface.RowConfig(
            max_running_requests=R,
            context_length=length,
            block_size=spec.diffusion.block_size,
            page_size=PAGE,
            num_pages=pool.num_pages,
            prefill_token_budget=R * length,
            max_prefill_tokens=R * length,
        )
    )
    wanted = [
        bucket
        for bucket in rows.buckets()
        if bucket.denoises != args.prefill and bucket.with_logits == args.with_logits
    ]
    largest = max(wanted, key=lambda bucket: (bucket.rows, bucket.tokens))
    program, batch = built.program(largest), batch_lib.ScheduleBatch(rows=(), bucket=largest)
    memory = jax.eval_shape(built.create_memory)
    memory = {name: memory[name] for name in program.uses}
    return program.step, (params, memory, program.inputs(batch, interrupts.shapes()))


def compiled_text(function: Any, arguments: tuple[Any, ...]) -> tuple[str, str]:
    """Returns the optimised program for an H200, and the sequence of thunks that XLA runs."""
    topology = topologies.get_topology_desc(
        topology_name="h200", platform="cuda", target_config=H200, topology="1x1x1"
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding), arguments
    )
    hopper = device.Device(
        platform="gpu",
        kind="NVIDIA H200",
        compute_capability=(9, 0),
        jax_version=jax.__version__,
    )
    with mock.patch.object(device, "local_device", lambda: hopper):
        packed = words_lib.packed_launch(function, arguments)
        words = jax.ShapeDtypeStruct(packed.words.shape, packed.words.dtype, sharding=sharding)
        lowered = packed.launch.lower(*arguments[:2], words)
    options = executables.compiler_options(GPU)
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options=options | {"xla_dump_to": folder})
        (thunks,) = pathlib.Path(folder).glob("*jit_launch.thunk_sequence_after_thunk_passes.txt")
        return compiled.as_text(), thunks.read_text()


def outside_graphs(thunks: str) -> list[str]:
    """Returns the loops that are no part of a CUDA graph, and in them what keeps them from it.

    A line of `thunks` is indented by its depth: `028: kWhile ...`, inside it `000: kCommandBuffer`.
    """
    found, around = [], []  # around: the lines that hold this one
    for line in thunks.splitlines():
        if one := re.match(r"( *)\d+: k(\w+)", line):
            around = [(depth, kind) for depth, kind in around if depth < len(one.group(1))]
            kinds = [kind for _, kind in around]
            around.append((len(one.group(1)), one.group(2)))
            is_lone_loop = one.group(2) == "While" and "CommandBuffer" not in kinds
            if is_lone_loop or (one.group(2) == "DynamicSliceFusion" and "While" in kinds):
                found.append(one.group(1) + one.group(2))
    return found


def computations(text: str) -> tuple[str, dict[str, list[tuple[str, str, str]]]]:
    """Returns (the entry's name, the instructions (name, operation, line) of each computation)."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = head.group(2)
            entry = name if head.group(1) else entry
            found[name] = []
        elif one := re.match(r"^\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\(", line):
            found[name].append((one.group(1), one.group(2), line))
    return entry, found


def show(found: dict[str, Any], name: str, depth: int, lists: bool) -> None:
    """Prints the loops that a computation holds, and what their bodies hold."""
    for _, operation, line in found[name]:
        if operation == "while":
            condition, body = (_computation(line, part) for part in ("condition", "body"))
            counts = [kernels(found, part) for part in (condition, body)]
            kinds = dict(collections.Counter(kind for kind, _ in counts[1]))
            sys.stdout.write(
                f"{'    ' * depth}loop: condition {len(counts[0])}, body {len(counts[1])} {kinds}\n"
            )
            if lists:
                for kind, source in counts[1]:
                    sys.stdout.write(f"{'    ' * depth}  {kind:16s} {source}\n")
            show(found, body, depth + 1, lists)
        elif operation == "call":
            show(found, _computation(line, "to_apply"), depth, lists)


def kernels(found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """Returns (kind, origin) of each launch of a computation, without those of inner loops."""
    launched = []
    for instruction, operation, line in found[name]:
        if operation == "call":
            launched += kernels(found, _computation(line, "to_apply"))
        elif operation not in FREE | {"while"}:
            source = re.search(r'op_name="([^"]*)"', line)
            launched.append((operation, source.group(1)[-70:] if source else instruction))
    return launched


def _computation(line: str, attribute: str) -> str:
    """Returns the name of the computation that an instruction has as an attribute."""
    match = re.search(rf"{attribute}=%?([\w.\-]+)", line)
    assert match is not None, line
    return match.group(1)


def main() -> None:
    """Parses the command line, compiles, prints the loops."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context-length", type=int, default=384)
    parser.add_argument("--dllm-algorithm", help="default: LowConfidence or FullAttnMultiBlock")
    parser.add_argument(
        "--with-logits", action="store_true", help="the launch of rows that need their logits"
    )
    parser.add_argument("--prefill", action="store_true", help="the largest launch of prefill")
    parser.add_argument("--list", action="store_true", help="every kernel, with its origin")
    args = parser.parse_args()
    text, thunks = compiled_text(*launch_of(args))
    entry, found = computations(text)
    sys.stdout.write(f"# {' '.join(sys.argv)}\n")
    outside = "\n    ".join(["", *outside_graphs(thunks)]).rstrip()
    sys.stdout.write(f"one CUDA graph: {f'no, loops remain{outside}' if outside else 'yes'}\n")
    sys.stdout.write(f"once a launch: {len(kernels(found, entry))}\n")
    show(found, entry, 0, args.list)


if __name__ == "__main__":
    main()
