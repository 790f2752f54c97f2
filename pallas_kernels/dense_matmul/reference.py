"""Dense matmuls of a layer by XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu_product(x: Float[Array, "T K"], w: Float[Array, "2*F K"]) -> Float[Array, "T F"]:
    """Returns silu(x @ gate.T) * (x @ up.T); every step is rounded."""
    gate, up = jnp.split(product(x, w), 2, axis=-1)
    return jax.nn.silu(gate) * up


def product(x: Float[Array, "T K"], w: Float[Array, "N K"]) -> Float[Array, "T N"]:
    """Returns x @ w.T."""
    # Not x @ w.T: this contracts both last axes, so it asks for no transposed copy.
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
