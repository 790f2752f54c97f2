"""The transformer of Z-Image: one stream of image and caption tokens (`ZImageTransformer2DModel`).

A row of a batch has its own timestep and its own caption. The model itself pads: image and caption
tokens each to a multiple of 32, with learned tokens that are attended like others. A caption of n
tokens so has n' = 32 * ceil(n / 32) rows, and the image stands at position n' + 1 of the first
axis. What a batch pads beyond n' is no part of the model. The joint sequence is
[image, caption], so this padding is its end, and attention needs only a length per row.

A sub-layer has a norm before and another after it. Scales and gates come from the timestep:

    x <- x + gate_a * attention_norm2(attention(attention_norm1(x) * scale_a))
    x <- x + gate_m * ffn_norm2(feed_forward(ffn_norm1(x) * scale_m))

All is as diffusers 0.42.1 computes it.

Letters: those of the whole project, and C latent channels, h and w latent sizes, L caption bucket,
E width of the timestep embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

import pallas_kernels
from jdllm.layers import axial_rope, linear, norm, timestep
from jdllm.models.images import component, step_cache, z_image_config
from jdllm.models.images.z_image_config import PATCH, ZImageConfig, padded

_TIMESTEP_WIDTH = 1024
_QK_NORM_EPS = 1e-5
_FINAL_NORM_EPS = 1e-6

# Scale and gate of attention, then of the feed-forward.
Modulation = tuple[Float32[Array, "B 1 D"] | float, ...]
UNMODULATED: Modulation = (1.0, 1.0, 1.0, 1.0)


class Attention(nnx.Module):
    """Full attention with norms of q and k; `w_qkv` [3D, D] holds q, then k, then v.

    A rank of several has some of the heads.
    """

    def __init__(self, config: ZImageConfig, *, dtype: jnp.dtype, implementation: str):
        D, H, own = config.dim, config.head_dim, config.dim // config.num_ranks
        self.num_ranks, self.num_heads = config.num_ranks, own // H
        self.implementation = implementation
        self.w_qkv: linear.Weight = nnx.Param(jnp.zeros((3 * own, D), dtype))
        self.w_out: linear.Weight = nnx.Param(jnp.zeros((D, own), dtype))
        self.norm_q = norm.RMSNorm(H, eps=_QK_NORM_EPS, dtype=dtype)
        self.norm_k = norm.RMSNorm(H, eps=_QK_NORM_EPS, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotation: axial_rope.CosSin,
        lengths: Int32[Array, " B"] | None,
    ) -> Float[Array, "B T D"]:
        B, T, _ = x.shape
        qkv = linear.product(x, self.w_qkv)
        qkv = qkv.reshape(B, T, 3, self.num_heads, -1)
        q, k, v = (qkv[:, :, part] for part in range(3))  # [B, T, N, H]
        out = pallas_kernels.padded_attention(
            axial_rope.rotate_pairs(self.norm_q(q), rotation),
            axial_rope.rotate_pairs(self.norm_k(k), rotation),
            v,
            lengths,
            implementation=self.implementation,
        )
        return linear.summed_product(out.reshape(B, T, -1), self.w_out, self.num_ranks)


class FeedForward(nnx.Module):
    """Computes `w2(silu(w1 x) * (w3 x))`; `w_gate_up` [2F, D] holds w1, then w3.

    A rank of several has a part of F.
    """

    def __init__(self, config: ZImageConfig, *, dtype: jnp.dtype):
        D, F = config.dim, config.feed_forward_width // config.num_ranks
        self.num_ranks = config.num_ranks
        self.w_gate_up: linear.Weight = nnx.Param(jnp.zeros((2 * F, D), dtype))
        self.w_down: linear.Weight = nnx.Param(jnp.zeros((D, F), dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = jnp.split(linear.product(x, self.w_gate_up), 2, axis=-1)
        return linear.summed_product(jax.nn.silu(gate) * up, self.w_down, self.num_ranks)


class Block(nnx.Module):
    """One layer of the transformer or of a refiner."""

    def __init__(self, config: ZImageConfig, *, dtype: jnp.dtype, implementation: str):
        def norm_() -> norm.RMSNorm:
            return norm.RMSNorm(config.dim, eps=config.norm_eps, dtype=dtype)

        self.attention_norm1, self.attention_norm2 = norm_(), norm_()
        self.attention = Attention(config, dtype=dtype, implementation=implementation)
        self.ffn_norm1, self.ffn_norm2 = norm_(), norm_()
        self.feed_forward = FeedForward(config, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotation: axial_rope.CosSin,
        lengths: Int32[Array, " B"] | None,
        modulation: Modulation,
    ) -> Float[Array, "B T D"]:
        scale_a, gate_a, scale_m, gate_m = modulation
        with jax.named_scope("attention"):
            h = (self.attention_norm1(x) * scale_a).astype(x.dtype)
            h = self.attention_norm2(self.attention(h, rotation, lengths))
            x = (x + gate_a * h).astype(x.dtype)
        with jax.named_scope("feed_forward"):
            h = (self.ffn_norm1(x) * scale_m).astype(x.dtype)
            h = self.ffn_norm2(self.feed_forward(h))
            return (x + gate_m * h).astype(x.dtype)


class ZImageTransformer(nnx.Module):
    """Velocities of latents; call it, or its two parts if captions outlive a step.

    `modulation` holds the layers that make scales and gates of all modulated blocks, those of
    `noise_refiner` first: one product instead of one for each block.
    """

    def __init__(self, config: ZImageConfig, dtype: jnp.dtype, *, implementation: str = "auto"):
        D, E = config.dim, config.timestep_embedding

        def blocks(count: int) -> nnx.List:
            made = [Block(config, dtype=dtype, implementation=implementation) for _ in range(count)]
            return nnx.List(made)

        self.config, self.dtype = config, jnp.dtype(dtype)
        self.t_embedder = timestep.TimestepEmbedder(_TIMESTEP_WIDTH, E, dtype=dtype)
        self.modulation = linear.Linear(E, config.num_modulated * 4 * D, dtype=dtype)
        self.x_embedder = linear.Linear(config.patch_dim, D, dtype=dtype)
        self.x_pad_token = nnx.Param(jnp.zeros((1, D), dtype))
        self.cap_norm = norm.RMSNorm(config.cap_feat_dim, eps=config.norm_eps, dtype=dtype)
        self.cap_embedder = linear.Linear(config.cap_feat_dim, D, dtype=dtype)
        self.cap_pad_token = nnx.Param(jnp.zeros((1, D), dtype))
        self.noise_refiner = blocks(config.n_refiner_layers)
        self.context_refiner = blocks(config.n_refiner_layers)
        self.layers = blocks(config.n_layers)
        self.final_modulation = linear.Linear(E, D, dtype=dtype)
        self.final_linear = linear.Linear(D, config.patch_dim, dtype=dtype)

    def __call__(
        self,
        latents: Float32[Array, "B C h w"],
        t: Float32[Array, " B"],  # 1 - sigma: 0 is noise, 1 is clean
        captions: Float[Array, "B L cap_feat_dim"],
        caption_lens: Int32[Array, " B"],  # 1 to L; what stands past them is not read
    ) -> Float32[Array, "B C h w"]:
        """Returns `clean - noise`, the negative of the velocity that an Euler step takes.

        h and w are even, L is a multiple of 32. Raises ValueError for other shapes, and for more
        tokens than config.json has positions for.
        """
        return self.denoise(latents, t, self.refine_captions(captions, caption_lens), caption_lens)

    def refine_captions(
        self, captions: Float[Array, "B L cap_feat_dim"], caption_lens: Int32[Array, " B"]
    ) -> Float[Array, "B L D"]:
        """Returns the caption tokens for `denoise`, which are the same at every timestep."""
        L = captions.shape[1]
        if L % z_image_config.SEQUENCE_MULTIPLE or self.config.axes_lens[0] < L + 2:
            raise ValueError(
                f"a caption bucket of {L} is no multiple of {z_image_config.SEQUENCE_MULTIPLE} "
                f"below axes_lens={self.config.axes_lens}"
            )
        x = self.cap_embedder(self.cap_norm(captions.astype(self.dtype)))
        is_own = jnp.arange(L) < caption_lens[:, None]
        x = jnp.where(is_own[:, :, None], x, self.cap_pad_token[...])
        rotation = self.rotation(caption_positions(L))
        for block in self.context_refiner:
            x = block(x, rotation, padded(caption_lens), UNMODULATED)
        return x

    def denoise(
        self,
        latents: Float32[Array, "B C h w"],
        t: Float32[Array, " B"],
        refined: Float[Array, "B L D"],
        caption_lens: Int32[Array, " B"],
        cache: step_cache.StepCache | None = None,
    ) -> Float32[Array, "B C h w"]:
        """Returns what `__call__` returns, given the result of `refine_captions`.

        With a `cache`, rows may leave out all `layers` but the first.
        """
        B, _, h, w = latents.shape
        rows, columns = h // PATCH, w // PATCH
        self._check_latents(latents.shape)
        embedding = self.t_embedder(t * self.config.t_scale)
        modulations = iter(self.modulations(embedding))
        image = self.rotation(image_positions(caption_lens, rows, columns))
        caption = self.rotation(caption_positions(refined.shape[1]))
        x = self.embed_patches(patchify(latents))
        for block in self.noise_refiner:
            x = block(x, image, None, next(modulations))
        image_tokens = x.shape[1]
        x = jnp.concatenate([x, refined], axis=1)
        cos, sin = (
            jnp.concatenate([i, jnp.broadcast_to(c, (B, *c.shape[1:]))], axis=1)
            for i, c in zip(image, caption)
        )
        lengths = image_tokens + padded(caption_lens)
        first, *rest = zip(self.layers, modulations, strict=True)

        def run(blocks: Sequence[tuple[Block, Modulation]], x: Array) -> Array:
            for block, modulation in blocks:
                x = block(x, (cos, sin), lengths, modulation)
            return x

        def own(x: Array) -> Array:
            """Returns the image tokens without padding."""
            return x[:, : rows * columns]

        after_first = run([first], x)
        if cache is None:
            image_out = own(run(rest, after_first))
        else:
            image_out = cache.through(own(x), own(after_first), lambda: own(run(rest, after_first)))
        return unpatchify(self.final(image_out, embedding), rows, columns)

    def embed_patches(self, patches: Float32[Array, "B T P"]) -> Float[Array, "B T_padded D"]:
        """Returns the image tokens, with pad tokens up to the next multiple of 32."""
        x = self.x_embedder(patches.astype(self.dtype))
        B, T, D = x.shape
        pads = jnp.broadcast_to(self.x_pad_token[...], (B, padded(T) - T, D))
        return jnp.concatenate([x, pads], axis=1)

    def modulations(self, embedding: Float32[Array, "B E"]) -> list[Modulation]:
        """Returns the modulation of each block of `noise_refiner`, then of each of `layers`."""
        made = self.modulation(embedding.astype(self.dtype), out_dtype=jnp.float32)
        made = made.reshape(len(made), self.config.num_modulated, 2, 2, 1, -1)
        scales, gates = 1 + made[:, :, :, 0], jnp.tanh(made[:, :, :, 1])
        return [
            (scales[:, i, 0], gates[:, i, 0], scales[:, i, 1], gates[:, i, 1])
            for i in range(self.config.num_modulated)
        ]

    def final(
        self, x: Float[Array, "B T D"], embedding: Float32[Array, "B E"]
    ) -> Float32[Array, "B T P"]:
        """Returns the patches of the velocity."""
        scale = 1 + self.final_modulation(jax.nn.silu(embedding))
        h = norm.layer_norm(x, eps=_FINAL_NORM_EPS) * scale[:, None]
        return self.final_linear(h.astype(self.dtype), out_dtype=jnp.float32)

    def rotation(self, positions: Int[Array | np.ndarray, "B T 3"]) -> axial_rope.CosSin:
        return axial_rope.angles(
            positions, axes_dims=self.config.axes_dims, theta=self.config.rope_theta
        )

    def _check_latents(self, shape: tuple[int, ...]) -> None:
        _, C, h, w = shape
        _, most_rows, most_columns = self.config.axes_lens
        if self.config.in_channels != C or h % PATCH or w % PATCH:
            raise ValueError(
                f"latents of {shape=} must have {self.config.in_channels} channels and even sizes"
            )
        if h // PATCH > most_rows or w // PATCH > most_columns:
            raise ValueError(
                f"latents of {shape=} have more tokens in a direction than "
                f"axes_lens={self.config.axes_lens}"
            )


def patchify(latents: Float[Array, "B C h w"]) -> Float[Array, "B T P"]:
    """Returns the patches of latents, row by row; the channel is a patch's innermost axis."""
    B, C, h, w = latents.shape
    x = latents.reshape(B, C, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.transpose(0, 2, 4, 3, 5, 1).reshape(B, -1, PATCH * PATCH * C)


def unpatchify(patches: Float[Array, "B T P"], rows: int, columns: int) -> Float[Array, "B C h w"]:
    """Returns the latents whose patches these are."""
    x = patches.reshape(len(patches), rows, columns, PATCH, PATCH, -1)
    return x.transpose(0, 5, 1, 3, 2, 4).reshape(len(x), -1, rows * PATCH, columns * PATCH)


def caption_positions(L: int) -> Int[np.ndarray, "1 L 3"]:
    """Returns the positions of caption tokens: 1, 2, ... on the first axis, pads too."""
    positions = np.zeros((1, L, 3), np.int32)
    positions[0, :, 0] = np.arange(1, L + 1)
    return positions


def image_positions(
    caption_lens: Int32[Array, " B"], rows: int, columns: int
) -> Int32[Array, "B T_padded 3"]:
    """Returns (place after the padded caption, row, column) of image tokens; pads stand at 0."""
    T = rows * columns
    positions = np.zeros((padded(T), 3), np.int32)
    positions[:T, 0] = 1
    positions[:T, 1:] = np.indices((rows, columns)).reshape(2, T).T
    after_caption = (padded(caption_lens) + 1)[:, None] * positions[:, 0]
    grid = jnp.broadcast_to(positions[:, 1:], (len(caption_lens), padded(T), 2))
    return jnp.concatenate([after_caption[:, :, None], grid], axis=-1)


_WEIGHTS = """
t_embedder.mlp.0.weight                               t_embedder.linear_1.weight
t_embedder.mlp.0.bias                                 t_embedder.linear_1.bias
t_embedder.mlp.2.weight                               t_embedder.linear_2.weight
t_embedder.mlp.2.bias                                 t_embedder.linear_2.bias
all_x_embedder.2-1.weight                             x_embedder.weight
all_x_embedder.2-1.bias                               x_embedder.bias
x_pad_token                                           x_pad_token
cap_embedder.0.weight                                 cap_norm.weight
cap_embedder.1.weight                                 cap_embedder.weight
cap_embedder.1.bias                                   cap_embedder.bias
cap_pad_token                                         cap_pad_token
all_final_layer.2-1.adaLN_modulation.1.weight         final_modulation.weight
all_final_layer.2-1.adaLN_modulation.1.bias           final_modulation.bias
all_final_layer.2-1.linear.weight                     final_linear.weight
all_final_layer.2-1.linear.bias                       final_linear.bias
"""
_BLOCK_WEIGHTS = """
blocks.{i}.attention.to_q.weight                      blocks.{i}.attention.w_qkv[0/3]
blocks.{i}.attention.to_k.weight                      blocks.{i}.attention.w_qkv[1/3]
blocks.{i}.attention.to_v.weight                      blocks.{i}.attention.w_qkv[2/3]
blocks.{i}.attention.to_out.0.weight                  blocks.{i}.attention.w_out
blocks.{i}.attention.norm_q.weight                    blocks.{i}.attention.norm_q.weight
blocks.{i}.attention.norm_k.weight                    blocks.{i}.attention.norm_k.weight
blocks.{i}.feed_forward.w1.weight                     blocks.{i}.feed_forward.w_gate_up[0/2]
blocks.{i}.feed_forward.w3.weight                     blocks.{i}.feed_forward.w_gate_up[1/2]
blocks.{i}.feed_forward.w2.weight                     blocks.{i}.feed_forward.w_down
blocks.{i}.attention_norm1.weight                     blocks.{i}.attention_norm1.weight
blocks.{i}.attention_norm2.weight                     blocks.{i}.attention_norm2.weight
blocks.{i}.ffn_norm1.weight                           blocks.{i}.ffn_norm1.weight
blocks.{i}.ffn_norm2.weight                           blocks.{i}.ffn_norm2.weight
"""
# The context refiner runs once for a prompt, so 8 bits would save nothing there, and all steps
# would have its error.
_FP8_WEIGHTS = """
layers.{i}.attention.w_qkv
layers.{i}.attention.w_out
layers.{i}.feed_forward.w_gate_up
layers.{i}.feed_forward.w_down
noise_refiner.{i}.attention.w_qkv
noise_refiner.{i}.attention.w_out
noise_refiner.{i}.feed_forward.w_gate_up
noise_refiner.{i}.feed_forward.w_down
"""
_MODULATED = ("noise_refiner", "layers")


def _weights(config: ZImageConfig) -> str:
    counts = (config.n_refiner_layers, config.n_layers)
    modulated = [f"{list_}.{i}" for list_, n in zip(_MODULATED, counts) for i in range(n)]
    modulation = [
        f"{block}.adaLN_modulation.0.{name}  modulation.{name}[{i}/{len(modulated)}]"
        for i, block in enumerate(modulated)
        for name in ("weight", "bias")
    ]
    lists = (*_MODULATED, "context_refiner")
    blocks = [_BLOCK_WEIGHTS.replace("blocks.", f"{list_}.") for list_ in lists]
    return "\n".join([_WEIGHTS, *blocks, *modulation])


COMPONENT = component.Component(
    class_names=("ZImageTransformer2DModel",),
    read=z_image_config.read,
    build=ZImageTransformer,
    weights=_weights,
    fp8_weights=_FP8_WEIGHTS,
    example={
        "in_channels": 4,
        "dim": 16,
        "n_layers": 2,
        "n_refiner_layers": 2,
        "n_heads": 2,
        "cap_feat_dim": 8,
        "axes_dims": [4, 2, 2],
        "axes_lens": [64, 8, 8],
    },
)
