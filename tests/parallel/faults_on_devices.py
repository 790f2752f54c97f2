"""What went wrong on any device of a mesh is known, not only what did on the first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdllm.device import devices, sharding
from jdllm.runner.launch import over_mesh


@pytest.mark.parametrize("wrong", [(), (0,), (1,), (0, 1)])
def test_the_faults_of_every_device_are_told(wrong):
    def checked(rank):
        if int(rank) in wrong:
            raise ValueError(f"RESOURCE_EXHAUSTED: rank {rank} has no room")
        return np.float32(rank)

    def step(x):
        rank = jax.lax.axis_index(sharding.AXIS)
        return x + 0 * jax.pure_callback(checked, jax.ShapeDtypeStruct((), jnp.float32), rank)

    everywhere = jax.shard_map(
        step,
        mesh=sharding.make_mesh(2, devices.every()),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = over_mesh.faults(jax.jit(everywhere)(jnp.ones(3)))
    assert len(found) == len(wrong)
    for rank, fault in zip(wrong, found, strict=True):
        assert fault.startswith(f"device {rank}: ")
        assert f"RESOURCE_EXHAUSTED: rank {rank} has no room" in fault


def test_one_device_is_not_asked():
    assert over_mesh.faults(jnp.ones(3)) == []
