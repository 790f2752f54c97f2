"""Choosing an implementation: what "auto" means, and what a forced choice that cannot run says."""

import jax.numpy as jnp
import pytest

from pallas_kernels import describe, dispatch, unembed_stats

OPS = ("extend_attention", "grouped_matmul", "unembed_stats")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("jax_version", ["0.10.2", "0.12.0"])
def test_auto_is_xla_everywhere(op, platform, jax_version):
    assert dispatch.choose(op, "auto", jax_version=jax_version, platform=platform) == "xla"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "cudnn"])
def test_forced_kernel_that_does_not_exist_raises(op, implementation):
    with pytest.raises(NotImplementedError, match="no such kernel in this build"):
        dispatch.choose(op, implementation)


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="auto, xla, dense, mosaic_gpu, cudnn"):
        dispatch.choose("grouped_matmul", "triton")


def test_dense_belongs_to_grouped_matmul_only():
    assert dispatch.choose("grouped_matmul", "dense") == "dense"
    with pytest.raises(ValueError, match="unknown"):
        dispatch.choose("extend_attention", "dense")


def test_describe_names_every_op():
    assert describe() == dict.fromkeys(OPS, "xla")


def test_ops_pass_the_forced_choice_on():
    with pytest.raises(NotImplementedError, match="unembed_stats: no such kernel"):
        unembed_stats(jnp.zeros((2, 4)), jnp.zeros((8, 4)), implementation="mosaic_gpu")
