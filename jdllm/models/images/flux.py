"""The transformer of FLUX.1 (`FluxTransformer2DModel`): double blocks, then single ones.

A double block has weights for the tokens of the image and others for those of the text, which
attend to each other; in a single block both are one sequence. Here it is [image, text]. Attention
does not know the order of its keys, and only image tokens have positions. So what a batch pads
behind a text is the end of the sequence, and attention needs only a length per row.

The text has as many tokens as the request says: its own pads are attended.

A token of the image is a patch of 2 x 2 latent pixels, packed by the pipeline, channel by channel.
All is as diffusers 0.42.1 computes it.

Letters: those of the whole project, and C channels of a packed token, T image tokens, L text
bucket, J both, E width of T5's embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

import pallas_kernels
from jdllm.layers import axial_rope, linear, norm, timestep
from jdllm.models.images import component, flux_config, flux_weights
from jdllm.models.images.flux_config import MLP_RATIO, PATCH, FluxConfig

_NORM_EPS = 1e-6
_ROPE_THETA = 10_000.0
_TIME_SCALE = 1000.0  # of noise levels and guidance

# Of a sub-layer: shift, scale and gate. A double block has two, a single one has one.
Modulation = tuple[Float32[Array, "B 1 D"], ...]


class Heads(nnx.Module):
    """Norms of q and k, each head by itself."""

    def __init__(self, config: FluxConfig, *, dtype: jnp.dtype):
        H = config.attention_head_dim
        self.num_heads = config.num_attention_heads
        self.norm_q = norm.RMSNorm(H, eps=_NORM_EPS, dtype=dtype)
        self.norm_k = norm.RMSNorm(H, eps=_NORM_EPS, dtype=dtype)

    def __call__(self, qkv: Float[Array, "B T 3*D"]) -> list[Float[Array, "B T N H"]]:
        """Returns q, k and v of a fused projection."""
        B, T, _ = qkv.shape
        qkv = qkv.reshape(B, T, 3, self.num_heads, -1)
        q, k, v = (qkv[:, :, part] for part in range(3))
        return [self.norm_q(q), self.norm_k(k), v]


class Stream(nnx.Module):
    """What a double block computes for one kind of tokens; `qkv` holds q, then k, then v."""

    def __init__(self, config: FluxConfig, *, dtype: jnp.dtype):
        D = config.dim
        self.qkv = linear.Linear(D, 3 * D, dtype=dtype)
        self.heads = Heads(config, dtype=dtype)
        self.out = linear.Linear(D, D, dtype=dtype)
        self.mlp_in = linear.Linear(D, MLP_RATIO * D, dtype=dtype)
        self.mlp_out = linear.Linear(MLP_RATIO * D, D, dtype=dtype)

    def project(
        self, x: Float[Array, "B T D"], modulation: Modulation
    ) -> list[Float[Array, "B T N H"]]:
        """Returns q, k and v."""
        shift, scale, *_ = modulation
        return self.heads(self.qkv(_modulated(x, shift, scale)))

    def finish(
        self, x: Float[Array, "B T D"], attended: Float[Array, "B T D"], modulation: Modulation
    ) -> Float[Array, "B T D"]:
        """Returns the tokens with what they attended to, after the feed-forward."""
        _, _, gate_a, shift_m, scale_m, gate_m = modulation
        x = (x + gate_a * self.out(attended)).astype(x.dtype)
        h = jax.nn.gelu(self.mlp_in(_modulated(x, shift_m, scale_m)), approximate=True)
        return (x + gate_m * self.mlp_out(h)).astype(x.dtype)


class DoubleBlock(nnx.Module):
    """Joint attention of two streams."""

    def __init__(self, config: FluxConfig, *, dtype: jnp.dtype, implementation: str):
        self.implementation = implementation
        self.image = Stream(config, dtype=dtype)
        self.text = Stream(config, dtype=dtype)

    def __call__(
        self,
        image: Float[Array, "B T D"],
        text: Float[Array, "B L D"],
        rotation: axial_rope.CosSin,
        lengths: Int32[Array, " B"],
        modulations: tuple[Modulation, Modulation],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B L D"]]:
        of_image, of_text = modulations
        joint = zip(self.image.project(image, of_image), self.text.project(text, of_text))
        q, k, v = (jnp.concatenate(both, axis=1) for both in joint)
        attended = _attend(q, k, v, rotation, lengths, self.implementation)
        T = image.shape[1]
        return (
            self.image.finish(image, attended[:, :T], of_image),
            self.text.finish(text, attended[:, T:], of_text),
        )


class SingleBlock(nnx.Module):
    """Attention and feed-forward beside each other, over the tokens of image and text.

    `qkv_mlp` holds q, k, v, then the first layer of the feed-forward; `out` takes what was
    attended to, then the hidden values of the feed-forward.
    """

    def __init__(self, config: FluxConfig, *, dtype: jnp.dtype, implementation: str):
        D = config.dim
        self.implementation = implementation
        self.qkv_mlp = linear.Linear(D, (3 + MLP_RATIO) * D, dtype=dtype)
        self.heads = Heads(config, dtype=dtype)
        self.out = linear.Linear((1 + MLP_RATIO) * D, D, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B J D"],
        rotation: axial_rope.CosSin,
        lengths: Int32[Array, " B"],
        modulation: Modulation,
    ) -> Float[Array, "B J D"]:
        shift, scale, gate = modulation
        projected = self.qkv_mlp(_modulated(x, shift, scale))
        qkv, hidden = jnp.split(projected, [3 * x.shape[-1]], axis=-1)
        attended = _attend(*self.heads(qkv), rotation, lengths, self.implementation)
        both = jnp.concatenate([attended, jax.nn.gelu(hidden, approximate=True)], axis=-1)
        return (x + gate * self.out(both)).astype(x.dtype)


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
        self.double_blocks = nnx.List(
            DoubleBlock(config, dtype=dtype, implementation=implementation)
            for _ in range(config.num_layers)
        )
        self.single_blocks = nnx.List(
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
        packed: Float32[Array, "B T C"],
        sigma: Float32[Array, " B"],
        guidance: Float32[Array, " B"],
        text: Float[Array, "B L D"],
        pooled: Float32[Array, "B D"],
        text_lens: Int32[Array, " B"],  # 0 to L; what stands past them is finite
        *,
        rows: int,
    ) -> Float32[Array, "B T C"]:
        """Returns `noise - clean` of packed latents; their T tokens stand in `rows` rows.

        A model without `guidance_embeds` does not read `guidance`.
        """
        T, L = packed.shape[1], text.shape[1]
        embedding = self.embed(sigma, guidance, pooled)
        image = self.x_embedder(packed.astype(self.dtype))
        rotation = self.rotation(rows, T // rows, L)
        lengths = T + text_lens
        for block, modulations in zip(self.double_blocks, self._of_double_blocks(embedding)):
            image, text = block(image, text, rotation, lengths, modulations)
        x = jnp.concatenate([image, text], axis=1)
        for block, modulation in zip(self.single_blocks, self._of_single_blocks(embedding)):
            x = block(x, rotation, lengths, modulation)
        return self.final(x[:, :T], embedding)

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

    def rotation(self, rows: int, columns: int, L: int) -> axial_rope.CosSin:
        """Returns the angles of the joint sequence; a text token stands at 0 and is not turned."""
        return axial_rope.angles(
            positions(rows, columns, L), axes_dims=self.config.axes_dims_rope, theta=_ROPE_THETA
        )

    def final(
        self, image: Float[Array, "B T D"], embedding: Float32[Array, "B D"]
    ) -> Float32[Array, "B T C"]:
        """Returns the packed velocity."""
        # The order of this layer; that of the blocks begins with the shift.
        (scale, shift) = _parts(self.final_modulation, embedding, 1, 2)[0]
        return self.proj_out(_modulated(image, shift, scale), out_dtype=jnp.float32)

    def _of_double_blocks(
        self, embedding: Float32[Array, "B D"]
    ) -> Iterator[tuple[Modulation, Modulation]]:
        count = self.config.num_layers
        layers = self.image_modulation, self.text_modulation
        return zip(*(_parts(layer, embedding, count, 6) for layer in layers))

    def _of_single_blocks(self, embedding: Float32[Array, "B D"]) -> list[Modulation]:
        return _parts(self.single_modulation, embedding, self.config.num_single_layers, 3)


def pack(latents: Float[Array, "B C h w"]) -> Float[Array, "B T 4*C"]:
    """Returns the patches of latents, row by row; the channel is a patch's outermost axis."""
    B, C, h, w = latents.shape
    x = latents.reshape(B, C, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(B, -1, C * PATCH * PATCH)


def unpack(packed: Float[Array, "B T 4*C"], rows: int) -> Float[Array, "B C h w"]:
    """Returns the latents whose patches these are, in so many rows of patches."""
    B, T, _ = packed.shape
    x = packed.reshape(B, rows, T // rows, -1, PATCH, PATCH).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(B, x.shape[1], rows * PATCH, -1)


def positions(rows: int, columns: int, L: int) -> Int[np.ndarray, "1 J 3"]:
    """Returns (0, row, column) of image tokens, then zeros for text tokens."""
    places = np.zeros((1, rows * columns + L, 3), np.int32)
    places[0, : rows * columns, 1:] = np.indices((rows, columns)).reshape(2, -1).T
    return places


def _attend(
    q: Float[Array, "B J N H"],
    k: Float[Array, "B J N H"],
    v: Float[Array, "B J N H"],
    rotation: axial_rope.CosSin,
    lengths: Int32[Array, " B"],
    implementation: str,
) -> Float[Array, "B J D"]:
    out = pallas_kernels.padded_attention(
        axial_rope.rotate_pairs(q, rotation),
        axial_rope.rotate_pairs(k, rotation),
        v,
        lengths,
        implementation=implementation,
    )
    return out.reshape(*out.shape[:2], -1)


def _modulated(
    x: Float[Array, "B T D"], shift: Float32[Array, "B 1 D"], scale: Float32[Array, "B 1 D"]
) -> Float[Array, "B T D"]:
    return (norm.layer_norm(x, eps=_NORM_EPS) * (1 + scale) + shift).astype(x.dtype)


def _parts(
    layer: linear.Linear, embedding: Float32[Array, "B D"], blocks: int, parts: int
) -> list[Modulation]:
    """Returns so many vectors for each block, from one product."""
    given = jax.nn.silu(embedding).astype(layer.weight[...].dtype)
    made = layer(given, out_dtype=jnp.float32)
    made = made.reshape(len(made), blocks, parts, 1, -1)
    return [tuple(made[:, i, part] for part in range(parts)) for i in range(blocks)]


COMPONENT = component.Component(
    class_names=("FluxTransformer2DModel",),
    read=flux_config.read,
    build=FluxTransformer,
    weights=flux_weights.weights,
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
