"""Packed latents: a token holds 2 x 2 latent pixels, as FLUX and Qwen-Image have them.

Letters: those of the whole project, and C latent channels, h and w latent sizes.
"""

from __future__ import annotations

from jaxtyping import Array, Float

PATCH = 2  # latent pixels of a token, in both directions


def pack(latents: Float[Array, "B C h w"]) -> Float[Array, "B T 4*C"]:
    """Returns the tokens of latents, row by row; the channel is a token's outermost axis."""
    B, C, h, w = latents.shape
    x = latents.reshape(B, C, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(B, -1, C * PATCH * PATCH)


def unpack(tokens: Float[Array, "B T 4*C"], grid: tuple[int, int]) -> Float[Array, "B C h w"]:
    """Returns the latents whose tokens these are, on a grid of rows and columns."""
    B, _, F = tokens.shape
    rows, columns = grid
    x = tokens.reshape(B, rows, columns, F // PATCH**2, PATCH, PATCH)
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(B, -1, rows * PATCH, columns * PATCH)


def check(shape: tuple[int, ...], grid: tuple[int, int], channels: int) -> None:
    """Raises ValueError unless this is the shape of tokens with so many channels on a grid."""
    tokens = grid[0] * grid[1]
    if shape[1:] != (tokens, channels):
        raise ValueError(
            f"latents of {shape=} must have {tokens} tokens for {grid=}, each of {channels} "
            "channels"
        )
