"""Arrays without elements do not cross into a mesh, where they crash XLA's partitioner."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdllm.device import devices, sharding
from jdllm.runner.launch import over_mesh


def test_a_step_gets_and_returns_arrays_without_elements_that_are_not_handed_over():
    mesh = sharding.make_mesh(2, devices.every())
    split = NamedSharding(mesh, sharding.SPLIT)
    params = {"w": jax.device_put(jnp.arange(4.0).reshape(2, 2), split)}
    memory = over_mesh.replicated({"state": jnp.ones((3, 2)), "edge": jnp.zeros((3, 0))}, mesh)
    memory["pages"] = jax.device_put(jnp.zeros((2, 5, 0), jnp.int32), split)
    inputs = {"x": jnp.full(3, 7.0), "ids": jnp.zeros((0, 3), jnp.int32)}

    def step(params, memory, inputs):
        assert memory["edge"].shape == (3, 0)
        assert memory["pages"].shape == (5, 0)
        assert memory["pages"].dtype == jnp.int32
        assert inputs["ids"].shape == (0, 3)
        total = jax.lax.psum(params["w"].sum(), sharding.AXIS)
        return memory | {"state": memory["state"] + total}, inputs["x"] + memory["edge"].sum()

    everywhere = over_mesh.on_every_rank(step, params, memory, mesh)
    traced = jax.jit(everywhere).trace(params, memory, inputs)
    (handed_over,) = (one for one in traced.jaxpr.jaxpr.eqns if one.primitive.name == "shard_map")
    crossing = [*handed_over.invars, *handed_over.outvars]
    assert len(crossing) == 3 + 2
    assert all(one.aval.size for one in crossing)

    left, outputs = jax.jit(everywhere)(params, memory, inputs)
    np.testing.assert_array_equal(left["state"], np.full((3, 2), 1 + 6.0))
    np.testing.assert_array_equal(outputs, np.full(3, 7.0))
    assert {name: (one.shape, one.dtype) for name, one in left.items()} == {
        name: (one.shape, one.dtype) for name, one in memory.items()
    }
