"""The choice of an implementation: what "auto" takes on a device, and the error of a refusal."""

import dataclasses

import jax.numpy as jnp
import pytest
from support import devices

from pallas_kernels import device, dispatch, unembed_stats
from pallas_kernels.hopper import compat

# Ops with a kernel of our own.
OPS = tuple(op for op, names in dispatch.IMPLEMENTATIONS.items() if "mosaic_gpu" in names)
HOPPER = devices.HOPPER


def other_than_hopper(**changes) -> device.Device:
    return dataclasses.replace(HOPPER, **changes)


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_the_kernel_on_hopper(op):
    choice = dispatch.choose(op, device=HOPPER)
    assert (choice.implementation, choice.refusals) == ("mosaic_gpu", {})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu", "compute_capability": (0, 0)}, "needs an NVIDIA GPU, this is cpu"),
        ({"compute_capability": (8, 0)}, "capability 9.0, this is 8.0"),
        ({"compute_capability": (10, 0)}, "capability 9.0, this is 10.0"),
        ({"jax_version": "0.10.2"}, "needs jax >= 0.11.1, this is 0.10.2"),
    ],
)
def test_elsewhere_auto_falls_back_and_says_why(op, changes, reason):
    choice = dispatch.choose(op, device=other_than_hopper(**changes))
    assert choice.implementation != "mosaic_gpu"
    assert reason in choice.refusals["mosaic_gpu"]
    assert reason in str(choice)


def test_a_shape_that_the_kernel_refuses_falls_back():
    refusals = {"mosaic_gpu": "odd shape", "cudnn": None}
    choice = dispatch.choose("extend_attention", refusals=refusals, device=HOPPER)
    assert (choice.implementation, choice.refusals) == ("cudnn", {"mosaic_gpu": "odd shape"})
    both = {"mosaic_gpu": "odd shape", "cudnn": "no"}
    assert dispatch.choose("extend_attention", refusals=both, device=HOPPER).implementation == (
        "xla"
    )


def test_cudnn_is_not_for_old_gpus():
    old = other_than_hopper(compute_capability=(7, 5))
    assert dispatch.choose("extend_attention", device=old).implementation == "xla"


@pytest.mark.parametrize("op", OPS)
def test_a_forced_choice_that_cannot_run_raises_with_the_reason(op):
    with pytest.raises(ValueError, match=f"{op}: mosaic_gpu cannot run here: needs jax"):
        dispatch.choose(op, "mosaic_gpu", device=other_than_hopper(jax_version="0.10.2"))
    with pytest.raises(ValueError, match="odd shape"):
        dispatch.choose(op, "mosaic_gpu", refusals={"mosaic_gpu": "odd shape"}, device=HOPPER)


def test_a_forced_choice_that_can_run_is_taken():
    assert dispatch.choose("extend_attention", "cudnn", device=HOPPER).implementation == "cudnn"
    assert dispatch.choose("grouped_matmul", "dense", device=HOPPER).implementation == "dense"


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="auto, mosaic_gpu, xla, dense"):
        dispatch.choose("grouped_matmul", "triton")
    with pytest.raises(ValueError, match="unknown"):
        dispatch.choose("extend_attention", "dense")


def test_ops_pass_the_forced_choice_on():
    with pytest.raises(ValueError, match="unembed_stats: mosaic_gpu cannot run here"):
        unembed_stats(jnp.zeros((2, 4)), jnp.zeros((8, 4)), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.10.2", False), ("0.11.0", False), ("0.11.1", True), ("0.12.0.1", True), ("1.0", True)],
)
def test_versions_compare_by_number(version, expected):
    assert compat.supported(version) is expected
