"""The transformer of FLUX.1 (`FluxTransformer2DModel`): double blocks, then single ones.

A double block has weights for the tokens of the image and others for those of the text, which
attend to each other; in a single block both are one sequence. Here it is [image, text]. Attention
does not know the order of its keys, and only image tokens have positions. So what a batch pads
behind a text is the end of the sequence, and attention needs only a length per row.

The text has as many tokens as the request says: its own pads are attended.

Latents are packed (`packing`). All is as diffusers 0.42.1 computes it.

Letters: those of the whole project, and C channels of a packed token, T image tokens, L text
bucket, J both, E width of T5's embeddings, M double blocks and S single ones.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

import pallas_kernels
from jdllm.layers import axial_rope, linear, norm, timestep
from jdllm.models.images import component, double_stream, flux_config, packing, step_cache
from jdllm.models.images.double_stream import MLP_RATIO, NUM_MODULATIONS
from jdllm.models.images.flux_config import FluxConfig

_NORM_EPS = 1e-6
_ROPE_THETA = 10_000.0
_TIME_SCALE = 1000.0  # of noise levels and guidance

_SINGLE_MODULATIONS = 3  # rows of size D for a single block: shift, scale, gate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Modulations:
    """What modulates all blocks in one step, by kinds of block.

    They follow from timestep, guidance and pooled text, and not from the latents. So they can be
    made before the step: they are 4.2 MB for each row and step of FLUX.1-dev, and the weights that
    make them 6.5 GB.
    """

    image: Float32[Array, "B M 6 D"]
    text: Float32[Array, "B M 6 D"]
    single: Float32[Array, "B S 3 D"]  # shift, scale, gate
    final: Float32[Array, "B 2 D"]  # scale, shift


class SingleBlock(nnx.Module):
    """Attention and feed-forward beside each other, over the tokens of image and text.

    `qkv_mlp` has the outputs of q, k, v, then those of the feed-forward's first layer; `out` takes
    what was attended to, then the hidden values of the feed-forward. A rank of several has some of
    the heads, and a part of the hidden values.
    """

    def __init__(self, config: FluxConfig, *, dtype: jnp.dtype, implementation: str):
        D, H = config.dim, config.attention_head_dim
        own = D // config.num_ranks
        self.head_dim, self.implementation = H, implementation
        self.qkv_mlp = linear.Linear(D, (3 + MLP_RATIO) * own, dtype=dtype)
        self.norm_q = norm.RMSNorm(H, eps=_NORM_EPS, dtype=dtype)
        self.norm_k = norm.RMSNorm(H, eps=_NORM_EPS, dtype=dtype)
        self.out = linear.Linear((1 + MLP_RATIO) * own, D, dtype=dtype, num_ranks=config.num_ranks)

    def __call__(
        self,
        x: Float[Array, "B J D"],
        rotation: axial_rope.CosSin,
        lengths: Int32[Array, " B"],
        modulation: Float32[Array, "B 3 D"],  # shift, scale, gate
    ) -> Float[Array, "B J D"]:
        B, J, _ = x.shape
        made = self.qkv_mlp(double_stream.modulated(x, modulation[:, :2]))
        qkv, hidden = jnp.split(made, [3 * (made.shape[-1] // (3 + MLP_RATIO))], axis=-1)
        qkv = qkv.reshape(B, J, 3, -1, self.head_dim)
        q, k, v = (qkv[:, :, part] for part in range(3))
        attended = pallas_kernels.padded_attention(
            axial_rope.rotate_pairs(self.norm_q(q), rotation),
            axial_rope.rotate_pairs(self.norm_k(k), rotation),
            v,
            lengths,
            implementation=self.implementation,
        )
        hidden = jax.nn.gelu(hidden, approximate=True)
        update = self.out(jnp.concatenate([attended.reshape(B, J, -1), hidden], axis=-1))
        return (x + modulation[:, None, 2] * update).astype(x.dtype)


class FluxTransformer(nnx.Module):
    """Velocities of latents: `embed_text` and `embed_pooled` once for a prompt, then `denoise`.

    The layers that make shifts, scales and gates are one product for all image streams, one for
    all text streams and one for all single blocks, instead of one for each block. They are not one
    altogether, whose weight would have more elements than 32 bits count.
    """

    def __init__(self, config: FluxConfig, dtype: jnp.dtype, *, implementation: str = "auto"):
        D = config.dim

        def embedder() -> timestep.TimestepEmbedder:
            return timestep.TimestepEmbedder(D, D, dtype=dtype)

        self.config, self.dtype = config, jnp.dtype(dtype)
        self.timestep_embedder = embedder()
        self.guidance_embedder = embedder() if config.guidance_embeds else None
        self.pooled_1 = linear.Linear(config.pooled_projection_dim, D, dtype=dtype)
        self.pooled_2 = linear.Linear(D, D, dtype=dtype)
        self.context_embedder = linear.Linear(config.joint_attention_dim, D, dtype=dtype)
        self.x_embedder = linear.Linear(config.in_channels, D, dtype=dtype)
        self.image_modulation = linear.Linear(D, config.num_layers * 6 * D, dtype=dtype)
        self.text_modulation = linear.Linear(D, config.num_layers * 6 * D, dtype=dtype)
        self.single_modulation = linear.Linear(D, config.num_single_layers * 3 * D, dtype=dtype)
        self.final_modulation = linear.Linear(D, 2 * D, dtype=dtype)
        self.transformer_blocks = nnx.List(
            double_stream.DoubleBlock(
                D,
                config.attention_head_dim,
                dtype=dtype,
                implementation=implementation,
                num_ranks=config.num_ranks,
            )
            for _ in range(config.num_layers)
        )
        self.single_transformer_blocks = nnx.List(
            SingleBlock(config, dtype=dtype, implementation=implementation)
            for _ in range(config.num_single_layers)
        )
        self.proj_out = linear.Linear(D, config.in_channels, dtype=dtype)

    def embed_text(self, embeddings: Float[Array, "B L E"]) -> Float[Array, "B L D"]:
        """Returns the text tokens of T5's embeddings."""
        return self.context_embedder(embeddings.astype(self.dtype))

    def embed_pooled(self, pooled: Float[Array, "B F"]) -> Float32[Array, "B D"]:
        """Returns CLIP's part of what modulates the blocks."""
        return self.pooled_2(jax.nn.silu(self.pooled_1(pooled.astype(jnp.float32))))

    def denoise(
        self,
        latents: Float32[Array, "B T C"],
        modulations: Modulations,  # of this step
        text: Float[Array, "B L D"],
        text_lens: Int32[Array, " B"],  # 0 to L; what stands past them is finite
        grid: tuple[int, int],  # rows and columns of tokens
        cache: step_cache.StepCache | None = None,
    ) -> Float32[Array, "B T C"]:
        """Returns the velocities `noise - clean`.

        Raises ValueError for latents of another shape. With a `cache`, rows may leave out all
        blocks but the first.
        """
        T, L = latents.shape[1], text.shape[1]
        packing.check(latents.shape, grid, self.config.in_channels)
        image = self.x_embedder(latents.astype(self.dtype))
        rotation = self.rotation(grid, L)
        lengths = T + text_lens
        doubles = [
            (block, (modulations.image[:, i], modulations.text[:, i]))
            for i, block in enumerate(self.transformer_blocks)
        ]
        (first, of_first), *others = doubles
        after_first = first(image, text, rotation, lengths, of_first)

        def rest() -> Float[Array, "B T D"]:
            image, text = after_first
            for block, of_both in others:
                image, text = block(image, text, rotation, lengths, of_both)
            x = jnp.concatenate([image, text], axis=1)
            for i, block in enumerate(self.single_transformer_blocks):
                x = block(x, rotation, lengths, modulations.single[:, i])
            return x[:, :T]

        last = rest() if cache is None else cache.through(image, after_first[0], rest)
        return self.final(last, modulations)

    def modulate(
        self,
        sigma: Float32[Array, " B"],
        guidance: Float32[Array, " B"],
        pooled: Float32[Array, "B D"],
    ) -> Modulations:
        """Returns what modulates steps at these noise levels, of the result of `embed_pooled`.

        A model without `guidance_embeds` does not read `guidance`.
        """
        return self.modulations(self.embed(sigma, guidance, pooled))

    def embed(
        self,
        sigma: Float32[Array, " B"],
        guidance: Float32[Array, " B"],
        pooled: Float32[Array, "B D"],
    ) -> Float32[Array, "B D"]:
        """Returns what modulates the blocks."""
        embedding = self.timestep_embedder(sigma * _TIME_SCALE) + pooled
        if self.guidance_embedder is not None:
            embedding += self.guidance_embedder(guidance * _TIME_SCALE)
        return embedding

    def modulations(self, embedding: Float32[Array, "B D"]) -> Modulations:
        """Returns the vectors of all blocks."""
        active = jax.nn.silu(embedding).astype(self.dtype)
        double, single = self.config.num_layers, self.config.num_single_layers
        return Modulations(
            image=double_stream.vectors(self.image_modulation, active, double, NUM_MODULATIONS),
            text=double_stream.vectors(self.text_modulation, active, double, NUM_MODULATIONS),
            single=double_stream.vectors(
                self.single_modulation, active, single, _SINGLE_MODULATIONS
            ),
            final=double_stream.vectors(self.final_modulation, active, 2),
        )

    def rotation(self, grid: tuple[int, int], L: int) -> axial_rope.CosSin:
        """Returns the angles of the joint sequence; a text token stands at 0 and is not turned."""
        return axial_rope.angles(
            positions(grid, L), axes_dims=self.config.axes_dims_rope, theta=_ROPE_THETA
        )

    def final(
        self, image: Float[Array, "B T D"], modulations: Modulations
    ) -> Float32[Array, "B T C"]:
        """Returns the velocities."""
        return double_stream.final(image, modulations.final, out=self.proj_out)


def positions(grid: tuple[int, int], L: int) -> Int[np.ndarray, "1 J 3"]:
    """Returns (0, row, column) of image tokens, then zeros for text tokens."""
    T = grid[0] * grid[1]
    at = np.zeros((1, T + L, 3), np.int32)
    at[0, :T, 1:] = np.indices(grid).reshape(2, -1).T
    return at


def modulation_shapes(config: FluxConfig) -> Modulations:
    """Returns the shapes of one row, without its axis."""

    def zeros(*counts: int) -> Array:
        return jnp.zeros((*counts, config.dim), jnp.float32)

    def of_row() -> Modulations:
        double = zeros(config.num_layers, NUM_MODULATIONS)
        single = zeros(config.num_single_layers, _SINGLE_MODULATIONS)
        return Modulations(image=double, text=double, single=single, final=zeros(2))

    return jax.eval_shape(of_row)


_WEIGHTS = (
    double_stream.weights("transformer_blocks.{i}", "ff", "ff_context")
    + """
time_text_embed.timestep_embedder.linear_1.weight timestep_embedder.linear_1.weight
time_text_embed.timestep_embedder.linear_1.bias  timestep_embedder.linear_1.bias
time_text_embed.timestep_embedder.linear_2.weight timestep_embedder.linear_2.weight
time_text_embed.timestep_embedder.linear_2.bias  timestep_embedder.linear_2.bias
time_text_embed.text_embedder.linear_1.weight    pooled_1.weight
time_text_embed.text_embedder.linear_1.bias      pooled_1.bias
time_text_embed.text_embedder.linear_2.weight    pooled_2.weight
time_text_embed.text_embedder.linear_2.bias      pooled_2.bias
context_embedder.weight                          context_embedder.weight
context_embedder.bias                            context_embedder.bias
x_embedder.weight                                x_embedder.weight
x_embedder.bias                                  x_embedder.bias
norm_out.linear.weight                           final_modulation.weight
norm_out.linear.bias                             final_modulation.bias
proj_out.weight                                  proj_out.weight
proj_out.bias                                    proj_out.bias
single_transformer_blocks.{i}.attn.to_q.weight   single_transformer_blocks.{i}.qkv_mlp.weight[0/7]
single_transformer_blocks.{i}.attn.to_q.bias     single_transformer_blocks.{i}.qkv_mlp.bias[0/7]
single_transformer_blocks.{i}.attn.to_k.weight   single_transformer_blocks.{i}.qkv_mlp.weight[1/7]
single_transformer_blocks.{i}.attn.to_k.bias     single_transformer_blocks.{i}.qkv_mlp.bias[1/7]
single_transformer_blocks.{i}.attn.to_v.weight   single_transformer_blocks.{i}.qkv_mlp.weight[2/7]
single_transformer_blocks.{i}.attn.to_v.bias     single_transformer_blocks.{i}.qkv_mlp.bias[2/7]
single_transformer_blocks.{i}.proj_mlp.weight    single_transformer_blocks.{i}.qkv_mlp.weight[3:7/7]
single_transformer_blocks.{i}.proj_mlp.bias      single_transformer_blocks.{i}.qkv_mlp.bias[3:7/7]
single_transformer_blocks.{i}.attn.norm_q.weight single_transformer_blocks.{i}.norm_q.weight
single_transformer_blocks.{i}.attn.norm_k.weight single_transformer_blocks.{i}.norm_k.weight
single_transformer_blocks.{i}.proj_out.weight    single_transformer_blocks.{i}.out.weight
single_transformer_blocks.{i}.proj_out.bias      single_transformer_blocks.{i}.out.bias
"""
)
_FP8_WEIGHTS = (
    double_stream.FP8_WEIGHTS
    + """
single_transformer_blocks.{i}.qkv_mlp.weight
single_transformer_blocks.{i}.out.weight
"""
)
_GUIDANCE = """
time_text_embed.guidance_embedder.linear_1.weight guidance_embedder.linear_1.weight
time_text_embed.guidance_embedder.linear_1.bias  guidance_embedder.linear_1.bias
time_text_embed.guidance_embedder.linear_2.weight guidance_embedder.linear_2.weight
time_text_embed.guidance_embedder.linear_2.bias  guidance_embedder.linear_2.bias
"""


def _weights(config: FluxConfig) -> str:
    double, single = config.num_layers, config.num_single_layers
    modulations = (
        ("transformer_blocks.{}.norm1.linear", "image_modulation", double),
        ("transformer_blocks.{}.norm1_context.linear", "text_modulation", double),
        ("single_transformer_blocks.{}.norm.linear", "single_modulation", single),
    )
    rows = [
        f"{tensor.format(i)}.{name}  {parameter}.{name}[{i}/{count}]"
        for tensor, parameter, count in modulations
        for i in range(count)
        for name in ("weight", "bias")
    ]
    return "\n".join([_WEIGHTS, _GUIDANCE if config.guidance_embeds else "", *rows])


COMPONENT = component.Component(
    class_names=("FluxTransformer2DModel",),
    read=flux_config.read,
    build=FluxTransformer,
    weights=_weights,
    fp8_weights=_FP8_WEIGHTS,
    example={
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
        "axes_dims_rope": [4, 2, 2],
    },
)
