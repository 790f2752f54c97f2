"""Blocks of two streams: image and text have their own weights and attend each other.

In each stream, with shift, scale and gate for both sub-layers,

    x <- x + gate_a * out(attention(norm(x) * (1 + scale_a) + shift_a))
    x <- x + gate_m * mlp(norm(x) * (1 + scale_m) + shift_m)

The norms have no weights. Attention is over both streams together, in the order [image, text]: what
a batch pads captions with is then the end of a row, and attention needs only a length per row. The
order changes nothing else, since every token carries its position.

Letters: those of the whole project, L tokens of a caption, and C channels of a packed token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

import pallas_kernels
from jdllm.layers import axial_rope, linear, norm

NUM_MODULATIONS = 6  # rows of size D for each stream of a block
MLP_RATIO = 4  # hidden numbers of a feed-forward, over the width
_EPS = 1e-6

# Shift, scale and gate of attention, then of the feed-forward.
Modulation = Float32[Array, "B 6 D"]


class Stream(nnx.Module):
    """The weights of one stream; `qkv` has the outputs of q, then k, then v.

    A rank of several has some of the heads, and a part of the feed-forward's hidden numbers.
    """

    def __init__(self, dim: int, head_dim: int, *, dtype: jnp.dtype, num_ranks: int = 1):
        own = dim // num_ranks
        self.head_dim = head_dim
        self.qkv = linear.Linear(dim, 3 * own, dtype=dtype)
        self.norm_q = norm.RMSNorm(head_dim, eps=_EPS, dtype=dtype)
        self.norm_k = norm.RMSNorm(head_dim, eps=_EPS, dtype=dtype)
        self.out = linear.Linear(own, dim, dtype=dtype, num_ranks=num_ranks)
        self.mlp_in = linear.Linear(dim, MLP_RATIO * own, dtype=dtype)
        self.mlp_out = linear.Linear(MLP_RATIO * own, dim, dtype=dtype, num_ranks=num_ranks)

    def heads(
        self, x: Float[Array, "B T D"], modulation: Modulation
    ) -> tuple[Float[Array, "B T N H"], ...]:
        """Returns q, k and v before their rotation."""
        B, T, _ = x.shape
        qkv = self.qkv(modulated(x, modulation[:, :2]))
        qkv = qkv.reshape(B, T, 3, -1, self.head_dim)
        return self.norm_q(qkv[:, :, 0]), self.norm_k(qkv[:, :, 1]), qkv[:, :, 2]

    def finish(
        self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"], modulation: Modulation
    ) -> Float[Array, "B T D"]:
        """Returns the stream after both sub-layers, given what attention has made of it."""
        x = _add(x, modulation[:, 2], self.out(attended.reshape(*x.shape[:2], -1)))
        with jax.named_scope("feed_forward"):
            h = self.mlp_in(modulated(x, modulation[:, 3:5]))
            return _add(x, modulation[:, 5], self.mlp_out(jax.nn.gelu(h, approximate=True)))


class DoubleBlock(nnx.Module):
    """One block; its modulations are made outside, for all blocks alike."""

    def __init__(
        self,
        dim: int,
        head_dim: int,
        *,
        dtype: jnp.dtype,
        implementation: str,
        num_ranks: int = 1,
    ):
        self.implementation = implementation
        self.image = Stream(dim, head_dim, dtype=dtype, num_ranks=num_ranks)
        self.text = Stream(dim, head_dim, dtype=dtype, num_ranks=num_ranks)

    def __call__(
        self,
        image: Float[Array, "B T D"],
        text: Float[Array, "B L D"],
        rotation: axial_rope.CosSin,  # of [image, text]; one row for all, or one for each
        lengths: Int32[Array, " B"] | None,  # of [image, text] without padding; None: no padding
        modulations: tuple[Modulation, Modulation],  # of image and text
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B L D"]]:
        """Returns both streams after the block. Padding of the text changes nothing but itself."""
        T = image.shape[1]
        of_image, of_text = modulations
        with jax.named_scope("attention"):
            streams = self.image.heads(image, of_image), self.text.heads(text, of_text)
            q, k, v = (jnp.concatenate(both, axis=1) for both in zip(*streams, strict=True))
            attended = pallas_kernels.padded_attention(
                axial_rope.rotate_pairs(q, rotation),
                axial_rope.rotate_pairs(k, rotation),
                v,
                lengths,
                implementation=self.implementation,
            )
        return (
            self.image.finish(image, attended[:, :T], of_image),
            self.text.finish(text, attended[:, T:], of_text),
        )


def modulated(
    x: Float[Array, "B T D"], shift_and_scale: Float32[Array, "B 2 D"]
) -> Float[Array, "B T D"]:
    """Returns norm(x) * (1 + scale) + shift in the dtype of `x`."""
    shift, scale = shift_and_scale[:, None, 0], shift_and_scale[:, None, 1]
    return (norm.layer_norm(x, eps=_EPS) * (1 + scale) + shift).astype(x.dtype)


def vectors(
    layer: linear.Linear, active: Float[Array, "B D"], *counts: int
) -> Float32[Array, "B ... D"]:
    """Returns shifts, scales and gates from one product: vectors of size D, `counts` of them."""
    return layer(active, out_dtype=jnp.float32).reshape(len(active), *counts, active.shape[-1])


def final(
    image: Float[Array, "B T D"],
    scale_and_shift: Float32[Array, "B 2 D"],
    *,
    out: linear.Linear,
) -> Float32[Array, "B T C"]:
    """Returns the result of a transformer; here the scale comes before the shift."""
    return out(modulated(image, scale_and_shift[:, ::-1]), out_dtype=jnp.float32)


def _add(
    x: Float[Array, "B T D"], gate: Float32[Array, "B D"], update: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    return (x + gate[:, None] * update).astype(x.dtype)


# The rows of a block's weight table that do not differ between models, under the block's path.
_WEIGHTS = """
attn.to_q.weight             image.qkv.weight[0/3]
attn.to_q.bias               image.qkv.bias[0/3]
attn.to_k.weight             image.qkv.weight[1/3]
attn.to_k.bias               image.qkv.bias[1/3]
attn.to_v.weight             image.qkv.weight[2/3]
attn.to_v.bias               image.qkv.bias[2/3]
attn.norm_q.weight           image.norm_q.weight
attn.norm_k.weight           image.norm_k.weight
attn.to_out.0.weight         image.out.weight
attn.to_out.0.bias           image.out.bias
attn.add_q_proj.weight       text.qkv.weight[0/3]
attn.add_q_proj.bias         text.qkv.bias[0/3]
attn.add_k_proj.weight       text.qkv.weight[1/3]
attn.add_k_proj.bias         text.qkv.bias[1/3]
attn.add_v_proj.weight       text.qkv.weight[2/3]
attn.add_v_proj.bias         text.qkv.bias[2/3]
attn.norm_added_q.weight     text.norm_q.weight
attn.norm_added_k.weight     text.norm_k.weight
attn.to_add_out.weight       text.out.weight
attn.to_add_out.bias         text.out.bias
"""

# The weights of both streams that are quantised, under the list of blocks. Text tokens are few, but
# their weights are read in every step.
FP8_WEIGHTS = "\n".join(
    f"transformer_blocks.{{i}}.{stream}.{layer}.weight"
    for stream in ("image", "text")
    for layer in ("qkv", "out", "mlp_in", "mlp_out")
)


def weights(block: str, image_mlp: str, text_mlp: str) -> str:
    """Returns the rows of a weight table for blocks at a path, such as `transformer_blocks.{i}`.

    `image_mlp` and `text_mlp` are what a checkpoint calls the feed-forwards.
    """
    mlp = [
        f"{name}.net.{tensor}.{kind} {stream}.{layer}.{kind}"
        for stream, name in (("image", image_mlp), ("text", text_mlp))
        for tensor, layer in (("0.proj", "mlp_in"), ("2", "mlp_out"))
        for kind in ("weight", "bias")
    ]
    pairs = [line.split() for line in (*_WEIGHTS.strip().splitlines(), *mlp)]
    return "\n".join(f"{block}.{tensor} {block}.{parameter}" for tensor, parameter in pairs) + "\n"
