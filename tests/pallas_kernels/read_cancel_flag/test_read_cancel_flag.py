"""Without the kernel the cancel flag is the given value; the kernel lowers for CUDA."""

import jax
import jax.numpy as jnp
import pytest
from support import devices

import pallas_kernels
from pallas_kernels.hopper import compat
from pallas_kernels.read_cancel_flag import mosaic_gpu

ADDRESS = jnp.zeros((2,), jnp.int32)


def test_without_a_kernel_the_flag_is_what_was_given():
    @jax.jit
    def steps(given):
        def body(carry):
            step, _ = carry
            return step + 1, pallas_kernels.read_cancel_flag(
                ADDRESS, given, step, implementation="xla"
            )

        return jax.lax.while_loop(
            lambda carry: (carry[0] < 5) & (carry[1] == 7), body, (jnp.int32(0), given)
        )

    assert [int(x) for x in steps(jnp.int32(7))] == [5, 7]
    assert [int(x) for x in steps(jnp.int32(8))] == [0, 8]


def test_a_forced_kernel_says_why_it_cannot_run(monkeypatch):
    devices.pretend(monkeypatch, devices.CPU)
    with pytest.raises(ValueError, match="read_cancel_flag: mosaic_gpu cannot run here: needs an"):
        pallas_kernels.read_cancel_flag(
            ADDRESS, jnp.int32(0), jnp.int32(0), implementation="mosaic_gpu"
        )


@pytest.mark.skipif(not compat.supported(), reason=f"needs jax >= {compat.MIN_JAX_VERSION}")
@pytest.mark.parametrize("shape", [(4,), (64, 32)])
def test_the_kernel_lowers_for_cuda(shape):
    arguments = (ADDRESS, jax.ShapeDtypeStruct(shape, jnp.int32))
    traced = jax.jit(mosaic_gpu.read_cancel_flag).trace(*arguments)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
