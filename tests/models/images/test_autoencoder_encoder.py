"""The encoder of `AutoencoderKL` against numpy loops that read the checkpoint by its names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_autoencoder

from jdllm.models import loading
from jdllm.models.images import autoencoder_kl

ATOL = 5e-5  # as for decoded images: the same layers
# An odd config: blocks of three widths, 2 resnets each, no attention, both 1 x 1 convolutions.
ODD = {
    **tiny_autoencoder.HF,
    "block_out_channels": [4, 8, 12],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "layers_per_block": 2,
    "latent_channels": 3,
    "norm_num_groups": 2,
    "mid_block_add_attention": False,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "scaling_factor": 2.5,
    "shift_factor": -0.25,
}


class Oracle:
    """One image [3, H, W] to moments [2 C, h, w], in float64."""

    def __init__(self, hf, tensors):
        self.hf = hf
        self.tensors = {name: array.astype(np.float64) for name, array in tensors.items()}

    def has(self, name):
        return f"{name}.weight" in self.tensors

    def conv(self, name, x, *, stride=1, pad=(1, 1)):
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        size = weight.shape[-1]
        x = np.pad(x, ((0, 0), pad, pad))
        rows = range(0, x.shape[1] - size + 1, stride)
        columns = range(0, x.shape[2] - size + 1, stride)
        out = np.zeros((len(weight), len(rows), len(columns)))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                window = x[:, row : row + size, column : column + size]
                out[:, i, j] = (weight * window).sum((1, 2, 3)) + bias
        return out

    def norm(self, name, x):
        groups = x.reshape(self.hf["norm_num_groups"], -1)
        centred = groups - groups.mean(1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return normed.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]

    def active(self, name, x):
        normed = self.norm(name, x)
        return normed / (1 + np.exp(-normed))

    def resnet(self, name, x):
        out = self.conv(f"{name}.conv1", self.active(f"{name}.norm1", x))
        out = self.conv(f"{name}.conv2", self.active(f"{name}.norm2", out))
        shortcut = f"{name}.conv_shortcut"
        return out + (self.conv(shortcut, x, pad=(0, 0)) if self.has(shortcut) else x)

    def attention(self, name, x):
        tokens = self.norm(f"{name}.group_norm", x).reshape(len(x), -1).T
        q, k, v = (self.linear(f"{name}.to_{letter}", tokens) for letter in "qkv")
        logits = q @ k.T / np.sqrt(len(x))
        shares = np.exp(logits - logits.max(1, keepdims=True))
        out = self.linear(f"{name}.to_out.0", shares / shares.sum(1, keepdims=True) @ v)
        return x + out.T.reshape(x.shape)

    def linear(self, name, tokens):
        return tokens @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def encode(self, image):
        x = self.conv("encoder.conv_in", image)
        for i in range(len(self.hf["block_out_channels"])):
            for j in range(self.hf["layers_per_block"]):
                x = self.resnet(f"encoder.down_blocks.{i}.resnets.{j}", x)
            down = f"encoder.down_blocks.{i}.downsamplers.0.conv"
            if self.has(down):
                x = self.conv(down, x, stride=2, pad=(0, 1))
        x = self.resnet("encoder.mid_block.resnets.0", x)
        if self.has("encoder.mid_block.attentions.0.to_q"):
            x = self.attention("encoder.mid_block.attentions.0", x)
        x = self.resnet("encoder.mid_block.resnets.1", x)
        x = self.conv("encoder.conv_out", self.active("encoder.conv_norm_out", x))
        return self.conv("quant_conv", x, pad=(0, 0)) if self.has("quant_conv") else x


@pytest.mark.parametrize(
    ("hf", "size"),
    [(tiny_autoencoder.HF, (16, 24)), pytest.param(ODD, (12, 8), marks=pytest.mark.campaign)],
    ids=["golden", "odd"],
)
def test_encodes_as_the_oracle(hf, size):
    tensors = tiny_autoencoder.tensors()
    if hf is ODD:
        tensors = tiny_autoencoder.random_tensors(ODD)
    images = np.random.RandomState(3).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    oracle = Oracle(hf, tensors)
    moments = np.stack([oracle.encode(np.moveaxis(image, -1, 0)) for image in images])
    mean, log_variance = np.split(moments, 2, axis=1)
    found = tiny_autoencoder.model(hf, tensors).encode(jnp.asarray(images))
    scaling, shift = hf["scaling_factor"], hf["shift_factor"]
    np.testing.assert_allclose(found[0], (mean - shift) * scaling, atol=ATOL)
    # A latent is linear in z, so its standard deviation is scaled as z is.
    deviation = np.exp(log_variance / 2) * scaling
    np.testing.assert_allclose(np.exp(np.asarray(found[1]) / 2), deviation, rtol=1e-4)
    assert [x.dtype for x in found] == [np.float32] * 2
    scale = 2 ** (len(hf["block_out_channels"]) - 1)
    assert found[0].shape == (2, hf["latent_channels"], size[0] // scale, size[1] // scale)


@pytest.mark.campaign
def test_decode_undoes_the_normalisation_of_encode():
    vae = tiny_autoencoder.model(ODD, tiny_autoencoder.random_tensors(ODD))
    images = np.random.RandomState(3).uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)
    mean = vae.encode(jnp.asarray(images))[0]
    moments = vae.quant_conv(vae.encoder(jnp.asarray(images)))
    raw = np.moveaxis(np.asarray(moments), -1, 1)[:, :3]
    np.testing.assert_allclose(vae.denormalise(mean), raw, atol=ATOL)


def test_variances_are_bounded_as_in_diffusers():
    tensors = tiny_autoencoder.random_tensors(ODD)
    tensors["quant_conv.bias"][3:] = [100.0, -100.0, 0.0]
    vae = tiny_autoencoder.model(ODD, tensors)
    log_variance = np.asarray(vae.encode(jnp.zeros((1, 8, 8, 3)))[1]) - 2 * np.log(2.5)
    assert np.allclose(log_variance[:, 0], 20) and np.allclose(log_variance[:, 1], -30)


def test_sides_that_the_encoder_cannot_halve_are_refused():
    with pytest.raises(ValueError, match="multiples of 8"):
        tiny_autoencoder.model().encode(jnp.zeros((1, 16, 20, 3)))


@pytest.mark.campaign
def test_every_parameter_has_a_gradient():
    params = tiny_autoencoder.params(ODD, tiny_autoencoder.random_tensors(ODD))
    graphdef, _ = autoencoder_kl.WITH_ENCODER.abstract(
        autoencoder_kl.WITH_ENCODER.read(ODD), jnp.dtype(jnp.float32)
    )
    images = np.random.RandomState(3).uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)

    def loss(params):
        vae = loading.merge(graphdef, params)
        mean, log_variance = vae.encode(jnp.asarray(images))
        out = vae.decode(mean + jnp.exp(log_variance / 2))
        return jnp.square(out - images).mean()

    gradients = jax.jit(jax.grad(loss))(params)
    # A bias before a norm of groups with one channel each would have none; these have several.
    silent = [path for path, grad in gradients.items() if not np.abs(grad).max() > 0]
    assert silent == []
