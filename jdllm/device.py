"""Asks JAX about the device; no other file does. Callers pass the answers on."""

from __future__ import annotations

import jax

from jdllm import device_facts
from pallas_kernels import device as kernel_device


def facts() -> device_facts.DeviceFacts:
    """Returns the facts of the device that this process computes on."""
    device, memory = kernel_device.local_device(), memory_use()
    return device_facts.DeviceFacts(
        platform=device.platform,
        device_kind=device.kind,
        memory_bytes=None if memory is None else memory[1],
        runs_hopper_kernels=device.hopper_refusal is None,
    )


def used() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm] # jax has no type for it
    """Returns the device that this process computes on."""
    return jax.local_devices()[0]


def memory_use() -> tuple[int, int] | None:
    """Returns (bytes in use, total bytes) of the accelerator; None if JAX does not report them."""
    stats = used().memory_stats()
    return (stats["bytes_in_use"], stats["bytes_limit"]) if stats else None


def peak_memory() -> int | None:
    """Returns the most bytes that were in use since the process began, or None as above."""
    stats = used().memory_stats()
    return stats["peak_bytes_in_use"] if stats else None
