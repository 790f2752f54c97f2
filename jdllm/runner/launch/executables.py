"""Compiled programs by bucket; threads lower and compile them ahead of time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

import pallas_kernels
from jdllm.device import facts, sharding
from jdllm.host import resources
from jdllm.runner.launch import interrupts, over_mesh, words
from jdllm.runner.launch.program import Kind, Memory, Params, Program
from jdllm.scheduler.batch import Bucket, NotCompiled, ScheduleBatch

logger = logging.getLogger(__name__)

# What one compilation takes of the host's memory; all of them may take half of what is there.
COMPILE_BYTES, MEMORY_SHARE = 1 << 30, 0.5
# What XLA may capture into a CUDA graph: its own default, and also loops and conditionals. With
# them a whole decode launch is one graph. Without them the host reads every loop condition: the
# host is blocked while the launch runs, and each step waits for the host (H200, one row: 7.2 ms
# a step instead of 6.1).
GRAPH_OPTION = "xla_gpu_enable_command_buffer"
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# XLA tries Triton's kernels for every product of 8-bit floats: a step of FLUX.1 took 104 s to
# compile, and 36 s without; cuBLASLt's, which remain, are as fast (28.9 ms for 29.5, H200).
FP8_OPTION = "xla_gpu_enable_triton_gemm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """A compiled program, with the layouts of the words that it takes and returns.

    `step_bytes`: the scratch and results that it needs besides its arguments. XLA takes some 10 ms
    of the interpreter to tell them, so it is asked once, by the thread that compiles.
    """

    program: Program
    packed: words.PackedLaunch
    compiled: jax.stages.Compiled
    choices: pallas_kernels.Choices  # the implementation of each op in the traced program
    step_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A program that is traced and not yet lowered for a platform."""

    program: Program
    packed: words.PackedLaunch
    traced: jax.stages.Traced
    choices: pallas_kernels.Choices


class Executables:
    """Every executable of a kind, by bucket; `step_bytes` is the most that one of them needs.

    The engine's thread and those that compile change it; everybody may read `step_bytes`.
    """

    def __init__(self, kind: Kind, device: facts.DeviceFacts):
        self._kind = kind
        self._options = compiler_options(device)
        self.by_bucket: dict[Bucket, Executable] = {}
        self.faults: dict[Bucket, Exception] = {}  # why a program is missing
        self.kernels: dict[str, str] = {}  # by op, a line on what the programs run
        self.step_bytes = 0
        self._lock = threading.Lock()  # of the programs and of the most bytes

    def compile(
        self,
        buckets: Sequence[Bucket],
        params: Params,
        memory: Memory,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Lowers and compiles every bucket; calls `on_progress(done, total)` after each."""
        done, lock = 0, threading.Lock()

        def compile_one(bucket: Bucket) -> None:
            nonlocal done
            started = time.monotonic()
            try:
                executable = self._compile(bucket, params, memory)
            except Exception as error:
                self.faults[bucket] = error
                raise
            self._add(bucket, executable)
            with lock:
                done += 1
                if on_progress is not None:
                    on_progress(done, len(buckets))
                took_s = time.monotonic() - started
                logger.info("compiled %d of %d: %s in %.1f s", done, len(buckets), bucket, took_s)

        with concurrent.futures.ThreadPoolExecutor(compile_threads()) as executor:
            # The largest first, so that no long compilation begins last.
            ordered = sorted(buckets, key=lambda bucket: (bucket.rows, bucket.tokens))[::-1]
            for future in [executor.submit(compile_one, bucket) for bucket in ordered]:
                future.result()
        self.kernels = self._describe_kernels()
        for op, line in self.kernels.items():
            logger.debug("kernel %s: %s", op, line)

    def of(self, bucket: Bucket) -> Executable:
        """Returns the executable of a bucket; raises what kept it from being compiled."""
        if bucket not in self.by_bucket and bucket in self.faults:
            raise NotCompiled(f"{bucket} was not compiled") from self.faults[bucket]
        return self.by_bucket[bucket]

    def forget(self, bucket: Bucket) -> None:
        """Drops the executable of a bucket, or the fault that kept it from being compiled."""
        with self._lock:
            self.by_bucket.pop(bucket, None)
            self.faults.pop(bucket, None)
            self.step_bytes = max((one.step_bytes for one in self.by_bucket.values()), default=0)

    def clear(self) -> None:
        """Drops every executable."""
        with self._lock:
            self.by_bucket.clear()
            self.step_bytes = 0

    def _add(self, bucket: Bucket, executable: Executable) -> None:
        with self._lock:
            self.by_bucket[bucket] = executable
            self.step_bytes = max(self.step_bytes, executable.step_bytes)

    def _describe_kernels(self) -> dict[str, str]:
        """Returns by op which implementations the programs contain, and why not faster ones."""
        return pallas_kernels.describe_choices(
            [one.choices for one in list(self.by_bucket.values())]
        )

    def trace(self, bucket: Bucket, params: Params, memory: Memory) -> Traced:
        """Returns the program of a bucket before it is lowered, for arrays like these."""
        program = self._kind.program(bucket)
        empty = ScheduleBatch(rows=(), bucket=bucket)
        parts = {name: memory[name] for name in program.uses}
        arguments = (params, parts, program.inputs(empty, interrupts.shapes()))
        mesh, step, results = over_mesh.mesh_of(params), program.step, None
        if mesh is None:
            arguments = jax.tree.map(_shape, arguments)
        else:
            arguments = over_mesh.abstract(arguments, mesh)
            step = over_mesh.on_every_rank(step, arguments[0], arguments[1], mesh)
            whole = NamedSharding(mesh, sharding.REPLICATED)
            results = over_mesh.shardings(arguments[1]), whole
        with pallas_kernels.record_choices() as choices:
            packed = words.packed_launch(step, arguments, results)
            traced = packed.launch.trace(*arguments[:2], packed.words)
        return Traced(program=program, packed=packed, traced=traced, choices=choices)

    def _compile(self, bucket: Bucket, params: Params, memory: Memory) -> Executable:
        found = self.trace(bucket, params, memory)
        options: dict[str, str | bool] = {**self._options, **fp8_options(found.choices)}
        compiled = found.traced.lower().compile(compiler_options=options)
        return Executable(
            program=found.program,
            packed=found.packed,
            compiled=compiled,
            choices=found.choices,
            step_bytes=_step_bytes(compiled),
        )


def _step_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of scratch and results that a program needs besides its arguments."""
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports the memory of a compiled program"
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _shape(leaf: Any) -> jax.Array | jax.ShapeDtypeStruct:
    """Returns shape and dtype of an argument, or itself if it is in the host's memory.

    A `ShapeDtypeStruct` would not do there: JAX places such an argument in the host's memory, but
    traces it as one on the device unless its sharding has a mesh. So the program would copy nothing
    to the device, and XLA for GPUs refuses to compute with what is not there.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == facts.HOST_MEMORY:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def compile_threads() -> int:
    """Returns how many programs this host compiles at a time: one per core, memory permitting.

    Lowering holds Python's interpreter lock, compiling does not.
    """
    memory = resources.available_memory()
    if memory is None:
        return resources.cores()
    return max(1, min(resources.cores(), int(memory * MEMORY_SHARE) // COMPILE_BYTES))


def compiler_options(device: facts.DeviceFacts) -> dict[str, str]:
    """Returns options for XLA beyond its defaults; none that the user's XLA_FLAGS set already."""
    if not device.uses_cuda_graphs or GRAPH_OPTION in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {GRAPH_OPTION: CAPTURED}


def fp8_options(choices: pallas_kernels.Choices) -> dict[str, str]:
    """Returns options for a program that multiplies 8-bit floats, none of the user's XLA_FLAGS."""
    multiplies = any(one.implementation == "xla_fp8" for one in choices.get("fp8_matmul", ()))
    is_given = FP8_OPTION in os.environ.get("XLA_FLAGS", "")
    return {FP8_OPTION: "False"} if multiplies and not is_given else {}
