"""Devices that a test lets ops be compiled for, whatever it runs on."""

import jax
import pytest

from pallas_kernels import device

HOPPER = device.Device(
    platform="gpu",
    kind="NVIDIA H200",
    compute_capability=(9, 0),
    jax_version="0.11.2",
)
CPU = device.Device(platform="cpu", kind="cpu", jax_version=jax.__version__)


def pretend(monkeypatch: pytest.MonkeyPatch, found: device.Device) -> None:
    """Lets ops choose, and kernels be tiled, as on this device."""
    monkeypatch.setattr(device, "local_device", lambda: found)
