"""One file asks for the device's facts, and it decides which kernels can run."""

import dataclasses
import pathlib

import jax
import pytest
from support import devices

import pallas_kernels
from pallas_kernels import device, tiles


def test_the_facts_are_those_of_jax():
    found, asked = device.local_device(), jax.local_devices()[0]
    assert (found.platform, found.kind) == (asked.platform, asked.device_kind)
    assert found.jax_version == jax.__version__
    assert found.num_multiprocessors > 0


@pytest.mark.parametrize(
    ("changes", "hopper", "cudnn"),
    [
        ({}, None, None),
        ({"jax_version": "0.10.2"}, "needs jax >= 0.11.1, this is 0.10.2", None),
        ({"compute_capability": (8, 9)}, "capability 9.0, this is 8.9", None),
        (
            {"compute_capability": (7, 5)},
            "capability 9.0, this is 7.5",
            "8.0 or later, this is 7.5",
        ),
        (
            {"platform": "tpu", "compute_capability": (0, 0)},
            "needs an NVIDIA GPU, this is tpu",
            "needs an NVIDIA GPU, this is tpu",
        ),
    ],
)
def test_what_cannot_run_is_said(changes, hopper, cudnn):
    found = dataclasses.replace(devices.HOPPER, **changes)
    for refusal, expected in ((found.hopper_refusal, hopper), (found.cudnn_refusal, cudnn)):
        assert refusal is None if expected is None else expected in refusal


@pytest.mark.parametrize(
    ("capability", "refusal"),
    [
        ((9, 0), None),
        ((8, 9), None),
        ((10, 0), None),
        ((8, 6), "8.9 or later, this is 8.6"),
        ((0, 0), "needs an NVIDIA GPU, this is gpu"),
    ],
)
def test_where_8_bit_floats_are_multiplied(capability, refusal):
    found = dataclasses.replace(devices.HOPPER, compute_capability=capability).fp8_refusal
    assert found is None if refusal is None else found is not None and refusal in found


def test_tables_are_found_by_the_device(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    assert tiles.device_name() == "nvidia_h200"
    assert tiles.path_of("extend_attention", tiles.device_name()).exists()


def test_nobody_else_asks_jax_for_devices():
    folder = pathlib.Path(pallas_kernels.__file__).parent
    asking = [
        path.name
        for path in folder.rglob("*.py")
        if any(name in path.read_text() for name in ("devices()", "default_backend"))
    ]
    assert asking == ["device.py"]
