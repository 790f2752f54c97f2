"""Owns weights, device memory and compiled programs of a model; launches a `ScheduleBatch`.

Buckets are lowered and compiled at start-up, rare ones later, in another thread; a launch only
looks up its executable. Each launch gets the memory (KV pool, row states) as a donated argument,
and its result replaces the memory, so the memory exists once. The host may start the next launch
before it has read the results of the one before. The model's kind of rows decides what the
programs are.

Letters: W words (`launch/words.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int32

from jdllm.device import facts
from jdllm.runner.launch import executables, interrupts, over_mesh, peer_buffers
from jdllm.runner.launch.program import Kind, Memory, Params
from jdllm.scheduler.batch import Bucket, LaunchResult, ScheduleBatch


class ModelRunner:
    """Executes batches of one loaded model; used by the engine thread only, but for `compile`."""

    def __init__(
        self,
        params: Params,
        kind: Kind,
        *,
        device: facts.DeviceFacts,
        peers: peer_buffers.PeerBuffers | None = None,
        implementation: str = "auto",
    ):
        self._peers = peers  # programs write to them by address
        self._params: Params = params
        if peers is not None:
            self._params = {**params, over_mesh.PEERS: peers.peers}
        self._kind = kind
        self._interrupts = interrupts.Interrupts(implementation=implementation)
        self._interrupt: interrupts.Interrupt | None = None  # for the next launch
        self._executables = executables.Executables(kind, device)
        self._memory = self._create_memory()

    @property
    def compiled(self) -> dict[Bucket, jax.stages.Compiled]:
        """The compiled programs by bucket, for tests of memory and donation."""
        found = list(self._executables.by_bucket.items())  # at once: another thread may add to it
        return {bucket: executable.compiled for bucket, executable in found}

    @property
    def step_bytes(self) -> int:
        """The most bytes of scratch and results that a program needs besides its arguments."""
        return self._executables.step_bytes

    @property
    def bytes_by_bucket(self) -> dict[Bucket, int]:
        """Bytes of scratch and results that each program needs besides its arguments."""
        found = list(self._executables.by_bucket.items())  # at once: another thread may add to it
        return {bucket: executable.step_bytes for bucket, executable in found}

    @property
    def kernels(self) -> dict[str, str]:
        """For each op, a line that says what the compiled programs run."""
        return self._executables.kernels

    def has_program(self, bucket: Bucket) -> bool:
        """Returns whether launches of this bucket can start, or have failed to compile."""
        return bucket in self._executables.by_bucket or bucket in self._executables.faults

    def compile(
        self,
        buckets: Sequence[Bucket],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Lowers and compiles every bucket; calls `on_progress(done, total)` after each.

        Another thread may call it while launches run.
        """
        self._executables.compile(buckets, self._params, self._memory, on_progress)

    def forget(self, bucket: Bucket) -> None:
        """Drops a program, or the fault that kept it from being compiled; running launches end."""
        self._executables.forget(bucket)

    def launch(self, batch: ScheduleBatch) -> Launch:
        """Starts a launch and returns at once; JAX runs launches in the order of these calls."""
        executable = self._executables.of(batch.bucket)
        program = executable.program
        words = executable.packed.pack(program.inputs(batch, self._next_interrupt()))
        parts = {name: self._memory[name] for name in program.uses}
        parts, outputs = executable.compiled(self._params, parts, words)
        self._memory |= parts
        outputs.copy_to_host_async()
        return Launch(outputs, executable, batch, self._interrupts)

    def begin_round(self) -> None:
        """From now on `interrupt` also ends the next launch, though it is not planned yet."""
        self._interrupt = self._interrupts.current()

    def interrupt(self) -> None:
        """Ends running launches after their present step, where the device can read the flag."""
        self._interrupts.request_stop()

    def reset(self) -> None:
        """Replaces the memory after a failed launch, which may have consumed it."""
        _delete(jax.tree.leaves(self._memory))  # first, since there is no room for two pools
        self._memory = self._create_memory()

    def release(self) -> None:
        """Frees weights and memory on the device; no launch can start afterwards."""
        _delete(jax.tree.leaves((self._params, self._memory)))
        self._executables.clear()
        self._peers = None

    def _create_memory(self) -> Memory:
        memory, mesh = self._kind.create_memory(), over_mesh.mesh_of(self._params)
        return memory if mesh is None else over_mesh.replicated(memory, mesh)

    def _next_interrupt(self) -> interrupts.Interrupt:
        # The interrupt of a round serves one launch. Used again after `interrupt` was called, it
        # would end every later launch at its first step.
        interrupt, self._interrupt = self._interrupt or self._interrupts.current(), None
        return interrupt


class Launch:
    """A running launch; its outputs are copied to the host as soon as they exist."""

    def __init__(
        self,
        outputs: Int32[Array, " W"],
        executable: executables.Executable,
        batch: ScheduleBatch,
        interrupts: interrupts.Interrupts,
    ):
        self._outputs = outputs
        self._executable = executable
        self._batch = batch
        self._interrupts = interrupts  # keeps alive the flag that the launch reads

    def is_ready(self) -> bool:
        """Returns whether the outputs exist."""
        return self._outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue] # jax.Array lacks it

    def result(self) -> LaunchResult:
        """Waits for the launch and returns its result; raises the error if it failed.

        Over several devices it is the errors of all.
        """
        if found := over_mesh.faults(self._outputs):
            raise jax.errors.JaxRuntimeError("; ".join(found))
        outputs = self._executable.packed.outputs.unpack(np.asarray(self._outputs))
        return self._executable.program.results(outputs, self._batch)


def _delete(arrays: Iterable[jax.Array]) -> None:
    for array in arrays:
        if not array.is_deleted():
            array.delete()
