"""Asks JAX about the device; no other file does. Callers pass the answers on."""

from __future__ import annotations

import os

import jax

from jdllm.device.facts import DeviceFacts
from pallas_kernels import device as kernel_device


def facts(count: int = 1) -> DeviceFacts:
    """Returns the facts of the devices that this process computes on, the first `count`."""
    device, memory = kernel_device.local_device(), memory_use(count)
    return DeviceFacts(
        platform=device.platform,
        device_kind=device.kind,
        memory_bytes=None if memory is None else memory[1],
        num_devices=count,
        runs_hopper_kernels=device.hopper_refusal is None,
    )


def prepare_several() -> None:
    """Sets what several GPUs need of CUDA and XLA, unless the environment does already.

    It has an effect only before JAX has asked for devices for the first time. While a GPU waits for
    another, nothing may wait for the GPU: CUDA loads all code at once, not at its first use. JAX
    takes 92 % of each GPU instead of 75 %, since split models are those that need it.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which nothing here uses


def used() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm] # jax has no type for it
    """Returns the device that this process computes on."""
    return jax.local_devices()[0]


def every() -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm] # as above
    """Returns the devices of this host, by number."""
    return jax.local_devices()


def memory_use(count: int = 1) -> tuple[int, int] | None:
    """Returns (bytes in use, total bytes) of the accelerator; None if JAX does not report them.

    Of several accelerators, the first `count`, it is the one with the least free memory.
    """
    every = [of_device for one in jax.local_devices()[:count] if (of_device := _memory(one))]
    return min(every, key=lambda one: one[1] - one[0], default=None)


def describe(count: int) -> list[dict[str, str | int | None]]:
    """Returns the first `count` devices: kind, number, and bytes of memory in use and in all."""
    devices = jax.local_devices()[:count]
    return [
        {"id": one.id, "kind": one.device_kind, "bytes_in_use": use[0], "bytes_limit": use[1]}
        for one in devices
        for use in [_memory(one) or (None, None)]
    ]


def peak_memory(count: int = 1) -> int | None:
    """Returns the most bytes that were in use since the process began, or None as above.

    Of the first `count` devices, it is the one that had most in use.
    """
    every = [stats for one in jax.local_devices()[:count] if (stats := one.memory_stats())]
    return max((stats["peak_bytes_in_use"] for stats in every), default=None)


def _memory(device: jax.Device) -> tuple[int, int] | None:  # pyright: ignore[reportInvalidTypeForm] # as above
    stats = device.memory_stats()
    return (stats["bytes_in_use"], stats["bytes_limit"]) if stats else None
