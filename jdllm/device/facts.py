"""Facts of the device; `devices.py` finds them once at start, and callers pass them on."""

from __future__ import annotations

import dataclasses

HOST_MEMORY = "pinned_host"  # JAX's name of memory of the host from which a device can copy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts that decide about shapes, memory and programs.

    `platform` is JAX's name ("cpu", "gpu"), `device_kind` the vendor's. `memory_bytes` is what
    the device gives to one process, None if JAX does not report it. `num_devices` counts the
    devices that this process uses. `runs_hopper_kernels`: Mosaic GPU kernels can run on it.
    """

    platform: str
    device_kind: str
    memory_bytes: int | None = None
    num_devices: int = 1
    runs_hopper_kernels: bool = False

    def __str__(self) -> str:
        return f"{self.platform}: {self.device_kind}"

    @property
    def is_cpu(self) -> bool:
        """Whether arithmetic bounds even small launches, and compiling takes long in comparison."""
        return self.platform == "cpu"

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a launch is one CUDA graph, which the host prepares before each run."""
        return self.platform == "gpu"

    @property
    def padding_is_cheap(self) -> bool:
        """Whether a small launch takes hardly less time than one with somewhat more tokens.

        That holds on an accelerator, which reads all weights for any number of tokens.
        """
        return not self.is_cpu
