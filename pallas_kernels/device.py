"""Facts of the device that kernels are compiled for: the one place of this package that asks jax.

Tests and tools that compile for another device replace `local_device`.
"""

import dataclasses
import functools

import jax

from pallas_kernels.hopper import compat

_H200_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a program is compiled for."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # for example "NVIDIA H200"
    compute_capability: tuple[int, int] = (0, 0)  # of NVIDIA GPUs
    num_multiprocessors: int = _H200_MULTIPROCESSORS  # an H200's: for kernels that are only lowered
    jax_version: str

    @property
    def hopper_refusal(self) -> str | None:
        """Why our kernels for Hopper cannot run here, None if they can."""
        major, minor = self.compute_capability
        if not major:
            return f"needs an NVIDIA GPU, this is {self.platform}"
        if (major, minor) != (9, 0):
            return f"written for compute capability 9.0, this is {major}.{minor}"
        if not compat.supported(self.jax_version):
            return f"needs jax >= {compat.MIN_JAX_VERSION}, this is {self.jax_version}"
        return None

    @property
    def cudnn_refusal(self) -> str | None:
        """Why cuDNN's attention cannot run here, None if it can."""
        major, minor = self.compute_capability
        if not major:
            return f"needs an NVIDIA GPU, this is {self.platform}"
        if major < 8:
            return f"needs compute capability 8.0 or later, this is {major}.{minor}"
        return None

    @property
    def fp8_refusal(self) -> str | None:
        """Why tensor cores cannot multiply 8-bit floats here, None if they can."""
        major, minor = self.compute_capability
        if not major:
            return f"needs an NVIDIA GPU, this is {self.platform}"
        if (major, minor) < (8, 9):
            return f"needs compute capability 8.9 or later, this is {major}.{minor}"
        return None


@functools.cache
def local_device() -> Device:
    """Returns the facts of this process's default device."""
    device = jax.local_devices()[0]
    facts = {
        "platform": device.platform,
        "kind": device.device_kind,
        "jax_version": jax.__version__,
    }
    if device.platform != "gpu":
        return Device(**facts)
    major, _, minor = str(device.compute_capability).partition(".")
    return Device(
        **facts,
        compute_capability=(int(major), int(minor or 0)),
        num_multiprocessors=device.core_count,
    )
