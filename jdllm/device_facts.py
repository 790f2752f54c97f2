"""Facts of the device, asked once at start (`jdllm/device.py`) and passed from there."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What decisions about shapes, memory and programs depend on.

    `platform` is JAX's ("cpu", "gpu"), `device_kind` the vendor's name of it. `memory_bytes` is
    what the device gives one process, None where nobody counts. `num_devices` are those that
    this process uses. `runs_hopper_kernels`: Mosaic GPU kernels can run there.
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
        """Whether arithmetic bounds a launch at once, and compiling takes long beside it."""
        return self.platform == "cpu"

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a launch is one CUDA graph, which the host prepares for each run."""
        return self.platform == "gpu"

    @property
    def padding_is_cheap(self) -> bool:
        """Whether a launch of few tokens takes hardly less time than one of somewhat more.

        It does on an accelerator, which reads all weights for any number of tokens.
        """
        return not self.is_cpu
