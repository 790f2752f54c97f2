"""Owns weights, KV pool, row states and compiled steps; launches a `ScheduleBatch`.

Every (phase, bucket) is lowered and compiled at start-up, ahead of time, in threads;
a launch only looks its executable up. Pool and row states are donated to each launch
and the result replaces them, so they exist once; the host may launch again before it
has read what a launch gave.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jdllm import errors
from jdllm import spec as spec_lib
from jdllm.kv_cache import pool as pool_lib
from jdllm.models import loading
from jdllm.runner import forward_batch, results, steps
from jdllm.runner.block import loop as decode_loop
from jdllm.runner.block import state as row_state
from jdllm.runner.canvas import loop as canvas_loop
from jdllm.runner.canvas import packing as canvas_packing
from jdllm.runner.canvas import state as canvas_state
from jdllm.runner.launch import interrupts, kernels
from jdllm.runner.launch import words as packing
from jdllm.scheduler import batch as batch_lib

logger = logging.getLogger(__name__)

# Lowering holds the interpreter, compiling does not.
COMPILE_THREADS = 8
# What XLA may capture into a CUDA graph: its own default, and loops and conditionals. With them a
# whole decode launch is one graph. Without, the host reads every loop condition: it is blocked
# while the launch runs, and each step waits for it (H200, one row: 7.2 ms a step, not 6.1).
_GRAPH_OPTION = "xla_gpu_enable_command_buffer"
_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


class ModelRunner:
    """Executes batches of one loaded model; used by the engine thread only."""

    def __init__(
        self,
        model: loading.LoadedModel,
        pool_config: pool_lib.PoolConfig,
        *,
        algorithms: tuple[str, ...],
        context_length: int,
        num_slots: int,
        decode_steps: int = 1,
        fuses_commits: bool = True,
        implementation: str = "auto",
    ):
        check_spec(model.spec)
        self.spec = model.spec
        self.pool_config = pool_config
        self._graphdef = model.graphdef
        self._params = loading.serving_params(model.params, pool_config.dtype)
        block_size = self.spec.diffusion.block_size
        canvas_length = context_length if self.spec.diffusion.has_canvas else 0
        # A context that ends inside a block still needs that block's scratch.
        last = -(-context_length // block_size) * block_size
        self._shape = forward_batch.BatchShape(
            block_size=block_size,
            page_size=pool_config.page_size,
            pages_per_row=-(-last // pool_config.page_size),
            num_slots=num_slots,
            algorithms=algorithms,
            canvas_length=canvas_length,
        )
        self._step_config = steps.StepConfig(
            spec=self.spec,
            page_size=pool_config.page_size,
            num_pages=pool_config.num_pages,
            algorithms=algorithms,
            max_launch_steps=decode_steps,
            fuses_commits=fuses_commits,
            implementation=implementation,
            canvas_length=canvas_length,
        )
        self.kernels = kernels.describe(
            self.spec,
            dtype=pool_config.dtype,
            page_size=pool_config.page_size,
            implementation=implementation,
        )
        self._interrupts = interrupts.Interrupts(implementation=implementation)
        self._interrupt: interrupts.Interrupt | None = None  # of the next launch
        self._executables: dict[batch_lib.Bucket, _Executable] = {}
        self._mask_token_id = self.spec.diffusion.mask_token_id
        self._pools = pool_lib.create(pool_config)
        self._slots = self._empty_slots()

    @property
    def compiled(self) -> dict[batch_lib.Bucket, jax.stages.Compiled]:
        """The executables by bucket, for tests of memory and donation."""
        return {bucket: executable.step for bucket, executable in self._executables.items()}

    @property
    def step_bytes(self) -> int:
        """Bytes of scratch and results that the hungriest step needs beside what it is given."""
        memories = [executable.step.memory_analysis() for executable in self._executables.values()]
        return max(
            memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            for memory in memories
        )

    def compile(
        self,
        buckets: Sequence[batch_lib.Bucket],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Lowers and compiles every bucket; `on_progress(done, total)` after each."""
        for op, choice in self.kernels.items():
            logger.info("kernel %s: %s", op, choice)
        done, lock = 0, threading.Lock()

        def compile_one(bucket: batch_lib.Bucket) -> None:
            nonlocal done
            started = time.monotonic()
            executable = self._compile(bucket)
            with lock:
                self._executables[bucket] = executable
                done += 1
                if on_progress is not None:
                    on_progress(done, len(buckets))
            logger.info(
                "compiled %s%s rows=%d tokens=%d in %.1f s",
                bucket.phase.value,
                " whole" * bucket.is_whole,
                bucket.rows,
                bucket.tokens,
                time.monotonic() - started,
            )

        with concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS) as executor:
            # The largest first, so that no long compile is left for the end.
            ordered = sorted(buckets, key=lambda bucket: (bucket.rows, bucket.tokens))[::-1]
            for future in [executor.submit(compile_one, bucket) for bucket in ordered]:
                future.result()

    def launch(self, batch: batch_lib.ScheduleBatch) -> Launch:
        """Starts a launch and returns at once; JAX runs launches in their order."""
        executable = self._executables[batch.bucket]
        inputs, memory = self._inputs_and_memory(batch)
        words = executable.packed.pack(inputs)
        memory, outputs = executable.step(self._params, memory, words)
        match batch.phase:
            case batch_lib.Phase.PREFILL:
                self._pools = memory
            case batch_lib.Phase.DECODE | batch_lib.Phase.CANVAS:
                self._pools, self._slots = memory
        outputs.copy_to_host_async()
        return Launch(outputs, executable.packed.outputs, len(batch.rows), self._interrupts)

    def begin_round(self) -> None:
        """Lets `interrupt` end, from now on, also the next launch, which is not planned yet."""
        self._interrupt = self._interrupts.current()

    def interrupt(self) -> None:
        """Lets launches under way end after the step they are in, where the device can be told."""
        self._interrupts.ask()

    def reset(self) -> None:
        """Replaces pool and row states after a failed launch, which may have consumed them."""
        _delete(self._pools)  # first: there is no room for two pools
        self._pools = pool_lib.create(self.pool_config)
        self._slots = self._empty_slots()

    def release(self) -> None:
        """Frees weights and pool on the device; nothing can be executed afterwards."""
        _delete((*self._params.values(), *self._pools, *jax.tree.leaves(self._slots)))
        self._executables.clear()

    def _inputs_and_memory(self, batch: batch_lib.ScheduleBatch) -> tuple[Any, Any]:
        match batch.phase:
            case batch_lib.Phase.PREFILL:
                return forward_batch.build_prefill(batch, self._shape), self._pools
            case batch_lib.Phase.DECODE:
                inputs = forward_batch.build_decode(
                    batch, self._shape, self._mask_token_id, self._next_interrupt()
                )
                return inputs, (self._pools, self._slots)
            case batch_lib.Phase.CANVAS:
                inputs = forward_batch.build_canvas(batch, self._shape, self._next_interrupt())
                return inputs, (self._pools, self._slots)

    def _next_interrupt(self) -> interrupts.Interrupt:
        # Each round's is for one launch: an old one would end every launch at its first step.
        given, self._interrupt = self._interrupt or self._interrupts.current(), None
        return given

    def _empty_slots(self) -> row_state.RowState | canvas_state.Slots:
        num_slots = self._shape.num_slots
        if not self._shape.canvas_length:
            return row_state.empty_slots(num_slots, self._step_config)
        return canvas_state.empty_slots(num_slots, self._step_config, self.pool_config.dtype)

    def _step_of(self, bucket: batch_lib.Bucket) -> Callable[..., Any]:
        """Returns the step of a bucket: (params, memory, inputs) -> (memory, outputs)."""
        match bucket.phase:
            case batch_lib.Phase.PREFILL:
                return functools.partial(steps.prefill_step, self._graphdef, self._step_config)
            case batch_lib.Phase.DECODE:
                return functools.partial(
                    decode_loop.decode_launch, self._graphdef, self._step_config
                )
            case batch_lib.Phase.CANVAS:
                sizes = (bucket.tokens,)
                if not bucket.is_whole:
                    sizes = canvas_packing.forward_sizes(
                        bucket.rows, bucket.tokens, padding_is_cheap=jax.default_backend() == "cpu"
                    )
                return functools.partial(
                    canvas_loop.canvas_launch, self._graphdef, self._step_config, sizes
                )

    def _compile(self, bucket: batch_lib.Bucket) -> _Executable:
        step = self._step_of(bucket)
        inputs, memory = self._inputs_and_memory(batch_lib.ScheduleBatch(rows=(), bucket=bucket))
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            (self._params, memory, inputs),
        )
        packed = packing.packed_launch(step, arguments)
        lowered = packed.launch.lower(*arguments[:2], packed.words)
        return _Executable(
            step=lowered.compile(compiler_options=_compiler_options()), packed=packed
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Executable:
    """A compiled step, and what the words are that it takes and returns."""

    step: jax.stages.Compiled
    packed: packing.PackedLaunch


def _compiler_options() -> dict[str, str]:
    """Returns XLA's options beyond its defaults; what the user's XLA_FLAGS name is left alone."""
    if jax.default_backend() != "gpu" or _GRAPH_OPTION in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_GRAPH_OPTION: _CAPTURED}


def _delete(arrays: Iterable[jax.Array]) -> None:
    for array in arrays:
        if not array.is_deleted():
            array.delete()


def check_spec(spec: spec_lib.ModelSpec) -> None:
    """Raises a ConfigError for a family that the steps here would run wrong."""
    diffusion = spec.diffusion
    is_block = diffusion.attention_pattern is spec_lib.AttentionPattern.BLOCK_CAUSAL
    if not diffusion.has_canvas and not is_block:
        raise errors.ConfigError(
            f"{spec.architecture}: serving with {diffusion.attention_pattern.value} attention is "
            "not supported"
        )
    # Block steps read logit row i for position i.
    if is_block and diffusion.logit_alignment is not spec_lib.LogitAlignment.SAME_POSITION:
        raise errors.ConfigError(
            f"{spec.architecture}: {diffusion.logit_alignment.value} logits are not "
            f"supported yet; supported: {spec_lib.LogitAlignment.SAME_POSITION.value}"
        )


class Launch:
    """A launch under way; its outputs travel to the host as soon as they are there."""

    def __init__(
        self,
        outputs: jax.Array,
        layout: packing.Layout,
        num_rows: int,
        told_by: interrupts.Interrupts,
    ):
        self._told_by = told_by  # owns a word that the launch reads
        self._outputs = outputs
        self._layout = layout
        self._num_rows = num_rows

    def is_ready(self) -> bool:
        """Returns whether the outputs are there."""
        return self._outputs.is_ready()

    def result(self) -> batch_lib.LaunchResult:
        """Waits for the launch; raises what it failed with."""
        return results.launch_result(self._layout.unpack(np.asarray(self._outputs)), self._num_rows)
