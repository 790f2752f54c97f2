"""The transformer of Qwen-Image: streams of image and text (`QwenImageTransformer2DModel`).

Latents are packed: a token holds 2 x 2 latent pixels, its channels outermost. Image positions are
centred, so that the middle of every image stands at (0, 0, 0), and those of text follow after them
on all three axes. They depend on the size of the image alone, so rows with captions of any lengths
share a table. A batch pads captions at their end, behind which nothing is attended.

All is as diffusers 0.42.1 computes it, but for timesteps, which stay float32 in every dtype.

Letters: those of the whole project, and L tokens of a caption, C latent channels of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

from jdllm.layers import axial_rope, linear, norm, timestep
from jdllm.models.images import component, double_stream, packing, qwen_image_config, step_cache
from jdllm.models.images.double_stream import NUM_MODULATIONS
from jdllm.models.images.qwen_image_config import NUM_POSITIONS, ROPE_THETA, QwenImageConfig

_TIMESTEPS_PER_SIGMA = 1000
_TEXT_NORM_EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Modulations:
    """What modulates all blocks in one step; of each block that of the image, then of the text.

    They follow from the timestep alone. So they can be made before the step, and both forwards of
    a guided image share them: they are 8.9 MB for each step of Qwen-Image, and the weights that
    make them 13.6 GB.
    """

    blocks: list[Float32[Array, "B 2 6 D"]]
    final: Float32[Array, "B 2 D"]  # scale, shift


class Block(double_stream.DoubleBlock):
    """A block and the layer that makes its modulations, those of the image first."""

    def __init__(self, config: QwenImageConfig, *, dtype: jnp.dtype, implementation: str):
        D = config.dim
        super().__init__(
            D,
            config.attention_head_dim,
            dtype=dtype,
            implementation=implementation,
            num_ranks=config.num_ranks,
        )
        self.modulation = linear.Linear(D, 2 * NUM_MODULATIONS * D, dtype=dtype)

    def modulations(self, active: Float[Array, "B D"]) -> Float32[Array, "B 2 6 D"]:
        """Returns the modulations of image and text.

        Each block has its own product: one for all would hold 6.8e9 weights, more than the 2**31
        that 32-bit indices reach, and be no faster, since reading the weights takes the time.
        """
        return double_stream.vectors(self.modulation, active, 2, NUM_MODULATIONS)


class QwenImageTransformer(nnx.Module):
    """Velocities of latents; call it, or its two parts if captions outlive a step."""

    def __init__(self, config: QwenImageConfig, dtype: jnp.dtype, *, implementation: str = "auto"):
        D = config.dim
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.timestep_embedder = timestep.TimestepEmbedder(D, D, dtype=dtype)
        self.image_in = linear.Linear(config.in_channels, D, dtype=dtype)
        self.text_norm = norm.RMSNorm(config.joint_attention_dim, eps=_TEXT_NORM_EPS, dtype=dtype)
        self.text_in = linear.Linear(config.joint_attention_dim, D, dtype=dtype)
        self.transformer_blocks = nnx.List(
            Block(config, dtype=dtype, implementation=implementation)
            for _ in range(config.num_layers)
        )
        self.final_modulation = linear.Linear(D, 2 * D, dtype=dtype)
        self.final_linear = linear.Linear(D, config.in_channels, dtype=dtype)

    def __call__(
        self,
        latents: Float32[Array, "B T C"],
        sigma: Float32[Array, " B"],  # noise levels: 1 is noise, 0 is clean
        captions: Float[Array, "B L joint_attention_dim"],
        caption_lens: Int32[Array, " B"],  # 1 to L; what stands past them changes nothing
        grid: tuple[int, int],  # rows and columns of tokens
    ) -> Float32[Array, "B T C"]:
        """Returns the velocities `noise - clean`.

        Raises ValueError for latents of another shape, and for more positions than there are.
        """
        text = self.embed_text(captions)
        return self.denoise(latents, self.modulate(sigma), text, caption_lens, grid)

    def embed_text(
        self, captions: Float[Array, "B L joint_attention_dim"]
    ) -> Float[Array, "B L D"]:
        """Returns the text tokens for `denoise`, which are the same at every timestep."""
        return self.text_in(self.text_norm(captions.astype(self.dtype)))

    def denoise(
        self,
        latents: Float32[Array, "B T C"],
        modulations: Modulations,  # of this step
        text: Float[Array, "B L D"],
        caption_lens: Int32[Array, " B"],
        grid: tuple[int, int],
        cache: step_cache.StepCache | None = None,
    ) -> Float32[Array, "B T C"]:
        """Returns what `__call__` returns, given the results of `modulate` and `embed_text`.

        With a `cache`, rows may leave out all blocks but the first.
        """
        T, L = latents.shape[1], text.shape[1]
        packing.check(latents.shape, grid, self.config.in_channels)
        _check_positions(grid, L)
        image = self.image_in(latents.astype(self.dtype))
        rotation = self.rotation(positions(grid, L))
        lengths = T + caption_lens
        first, *rest = zip(self.transformer_blocks, modulations.blocks, strict=True)

        def run(
            blocks: Sequence[tuple[Block, Array]], image: Array, text: Array
        ) -> tuple[Array, Array]:
            for block, both in blocks:
                image, text = block(image, text, rotation, lengths, (both[:, 0], both[:, 1]))
            return image, text

        after_first = run([first], image, text)
        if cache is None:
            image, _ = run(rest, *after_first)
        else:
            image = cache.through(image, after_first[0], lambda: run(rest, *after_first)[0])
        return self.final(image, modulations)

    def modulate(self, sigma: Float32[Array, " B"]) -> Modulations:
        """Returns what modulates steps at these noise levels."""
        return self.modulations(self.timestep_embedder(sigma * _TIMESTEPS_PER_SIGMA))

    def modulations(self, embedding: Float32[Array, "B D"]) -> Modulations:
        """Returns the vectors of all blocks."""
        active = jax.nn.silu(embedding).astype(self.dtype)
        return Modulations(
            blocks=[block.modulations(active) for block in self.transformer_blocks],
            final=double_stream.vectors(self.final_modulation, active, 2),
        )

    def final(
        self, image: Float[Array, "B T D"], modulations: Modulations
    ) -> Float32[Array, "B T C"]:
        """Returns the velocities."""
        return double_stream.final(image, modulations.final, out=self.final_linear)

    def rotation(self, at: Int[np.ndarray, "1 T 3"]) -> axial_rope.CosSin:
        return axial_rope.angles(at, axes_dims=self.config.axes_dims_rope, theta=ROPE_THETA)


def positions(grid: tuple[int, int], L: int) -> Int[np.ndarray, "1 T+L 3"]:
    """Returns the positions (frame, row, column) of image tokens, then of text tokens.

    Of an odd number of rows one more stands before the middle than after it.
    """
    at = np.zeros((1, grid[0] * grid[1] + L, 3), np.int32)
    centre = [size - size // 2 for size in grid]
    T = grid[0] * grid[1]
    at[0, :T, 1:] = np.indices(grid).reshape(2, -1).T - centre
    at[0, T:] = max(grid) // 2 + np.arange(L)[:, None]
    return at


def modulation_shapes(config: QwenImageConfig) -> Modulations:
    """Returns the shapes of one row, without its axis."""

    def of_row() -> Modulations:
        block = jnp.zeros((2, NUM_MODULATIONS, config.dim), jnp.float32)
        final = jnp.zeros((2, config.dim), jnp.float32)
        return Modulations(blocks=[block] * config.num_layers, final=final)

    return jax.eval_shape(of_row)


def _check_positions(grid: tuple[int, int], L: int) -> None:
    if max(grid) // 2 + L > NUM_POSITIONS:
        raise ValueError(
            f"{grid=} and captions of {L} tokens need more than {NUM_POSITIONS} positions"
        )


_BLOCK = "transformer_blocks.{i}"
_WEIGHTS = (
    double_stream.weights(_BLOCK, "img_mlp", "txt_mlp")
    + """
transformer_blocks.{i}.img_mod.1.weight                transformer_blocks.{i}.modulation.weight[0/2]
transformer_blocks.{i}.img_mod.1.bias                  transformer_blocks.{i}.modulation.bias[0/2]
transformer_blocks.{i}.txt_mod.1.weight                transformer_blocks.{i}.modulation.weight[1/2]
transformer_blocks.{i}.txt_mod.1.bias                  transformer_blocks.{i}.modulation.bias[1/2]
time_text_embed.timestep_embedder.linear_1.weight      timestep_embedder.linear_1.weight
time_text_embed.timestep_embedder.linear_1.bias        timestep_embedder.linear_1.bias
time_text_embed.timestep_embedder.linear_2.weight      timestep_embedder.linear_2.weight
time_text_embed.timestep_embedder.linear_2.bias        timestep_embedder.linear_2.bias
img_in.weight                                          image_in.weight
img_in.bias                                            image_in.bias
txt_norm.weight                                        text_norm.weight
txt_in.weight                                          text_in.weight
txt_in.bias                                            text_in.bias
norm_out.linear.weight                                 final_modulation.weight
norm_out.linear.bias                                   final_modulation.bias
proj_out.weight                                        final_linear.weight
proj_out.bias                                          final_linear.bias
"""
)

COMPONENT = component.Component(
    class_names=("QwenImageTransformer2DModel",),
    read=qwen_image_config.read,
    build=QwenImageTransformer,
    weights=lambda _: _WEIGHTS,
    # Not `modulation`: it sees one row for each image, and every token its error.
    fp8_weights=double_stream.FP8_WEIGHTS,
    example={
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 8,
        "axes_dims_rope": [4, 2, 2],
    },
)
