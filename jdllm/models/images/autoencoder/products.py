"""Convolutions as matrix products of patches, with a gradient of matrix products.

For training: XLA leaves the gradients of convolutions of few channels to libraries, which take
minutes to choose kernels, or choose slow ones unasked. Here each is one product; the patches are
9 times the picture, and are made again for the gradient.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Picture = Float[Array, "B H W C"]
Kernel = Float[Array, "size size C D"]


def convolve(
    x: Picture, kernel: Kernel, stride: int, padding: tuple[int, int]
) -> Float[Array, "B h w D"]:
    """Returns the convolution with zeros before and behind both sides, in the dtype of `x`."""
    out: jax.Array = _convolve(x, kernel, stride, padding)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x, kernel, stride, padding):
    size, _, _, width = kernel.shape
    return patches(x, size, stride, padding) @ kernel.reshape(-1, width)


def patches(
    x: Picture, size: int, stride: int, padding: tuple[int, int]
) -> Float[Array, "B h w size*size*C"]:
    """Returns what the kernel sees at each position of the result, its rows after each other."""
    x = jnp.pad(x, ((0, 0), padding, padding, (0, 0)))
    height, width = ((side - size) // stride + 1 for side in x.shape[1:3])
    rows, columns = stride * (height - 1) + 1, stride * (width - 1) + 1
    seen = [
        x[:, i : i + rows : stride, j : j + columns : stride]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.concatenate(seen, axis=-1)


def _forward(x, kernel, stride, padding):
    return _convolve(x, kernel, stride, padding), (x, kernel)


def _backward(stride, padding, residuals, grad):
    x, kernel = residuals
    size, _, _, width = kernel.shape
    seen, transposed = jax.vjp(lambda x: patches(x, size, stride, padding), x)
    # A product for each picture, summed afterwards: a single one has few columns and rows, and
    # would keep most of a GPU idle.
    of_pictures = jnp.einsum("BHWK,BHWD->BKD", seen, grad, preferred_element_type=jnp.float32)
    of_kernel = of_pictures.sum(0).reshape(kernel.shape).astype(kernel.dtype)
    (of_x,) = transposed(grad @ kernel.reshape(-1, width).T)
    return of_x, of_kernel


_convolve.defvjp(_forward, _backward)
