"""Dense matmuls of a layer by XLA."""

import jax
import jax.numpy as jnp


def swiglu_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns silu(x @ gate.T) * (x @ up.T) for w [2 * F, K], each step rounded."""
    gate, up = jnp.split(product(x, w), 2, axis=-1)
    return jax.nn.silu(gate) * up


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x @ w.T."""
    # Not x @ w.T: both last axes are contracted, so nobody is asked for a transposed copy.
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
