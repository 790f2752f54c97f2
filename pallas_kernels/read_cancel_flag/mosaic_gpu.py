"""Reads a flag in pinned host memory: one thread, one load past the caches; 2 us a call (H200)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hopper import compat, lane_code


def read_cancel_flag(
    address: Int32[Array, "2"],  # the low and the high half
    after: Shaped[Array, "..."],  # of a dtype that a kernel takes
) -> Int32[Array, ""]:
    """Returns the number at the address; see `pallas_kernels.read_cancel_flag`."""

    def read_cancel_flag(address_gmem, after_gmem, flag_gmem):
        del after_gmem  # it is an operand only so that the read waits for it

        @compat.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def read(_, address_ref, flag_ref):
            first, second = lane_code.constant(0), lane_code.constant(1)
            with lane_code.when(lane_code.thread().equals(0)):
                low = lane_code.load(address_ref, first)
                high = lane_code.load(address_ref, second)
                lane_code.store(flag_ref, first, lane_code.load_host(low, high))

        read(address_gmem, flag_gmem)

    (flag,) = compat.kernel(read_cancel_flag, out_type=(jax.ShapeDtypeStruct((1,), jnp.int32),))(
        address, after
    )
    return flag[0]
