"""A request with a step cache, denoised by a plain loop over the pieces of its transformer.

One row at a time, each block called by itself, and every decision made here in numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from support import golden_flux, golden_images, golden_qwen_image

from jdllm.models.images import qwen_image as qwen_transformer
from jdllm.models.images import z_image
from jdllm.pipelines import interface, qwen_image


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """Image tokens before and after the first block; `rest` and `velocity` are the remainder."""

    before: np.ndarray
    after_first: np.ndarray
    rest: Callable[[], np.ndarray]
    velocity: Callable[[np.ndarray], np.ndarray]


def z_image_forward(model, latents, sigma, caption, num_ids, image):
    del image
    lens, x = jnp.array([num_ids]), jnp.asarray(latents)[None]
    rows, columns = latents.shape[1] // 2, latents.shape[2] // 2
    T = rows * columns
    embedding = model.t_embedder(jnp.array([(1 - sigma) * model.config.t_scale], jnp.float32))
    modulations = iter(model.modulations(embedding))
    image = model.rotation(z_image.image_positions(lens, rows, columns))
    text = model.rotation(z_image.caption_positions(caption.shape[1]))
    x = model.embed_patches(z_image.patchify(x))
    for block in model.noise_refiner:
        x = block(x, image, None, next(modulations))
    lengths = jnp.array([x.shape[1] + -(-num_ids // 32) * 32])
    before = jnp.concatenate([x, caption], axis=1)
    joint = tuple(jnp.concatenate(parts, axis=1) for parts in zip(image, text, strict=True))
    first, *others = model.layers
    after = first(before, joint, lengths, next(modulations))

    def rest():
        y = after
        for block, modulation in zip(others, modulations, strict=True):
            y = block(y, joint, lengths, modulation)
        return np.asarray(y)[0, :T]

    def velocity(tokens):
        made = model.final(jnp.asarray(tokens)[None], embedding)
        return -np.asarray(z_image.unpatchify(made, rows, columns))[0]

    return Forward(
        before=np.asarray(before)[0, :T],
        after_first=np.asarray(after)[0, :T],
        rest=rest,
        velocity=velocity,
    )


def qwen_image_forward(model, latents, sigma, caption, num_ids, params):
    grid = params.height // 16, params.width // 16
    modulations = model.modulate(jnp.array([sigma], jnp.float32))
    of_blocks = [(one[:, 0], one[:, 1]) for one in modulations.blocks]
    image = model.image_in(jnp.asarray(latents)[None])
    num_ids -= qwen_image.PREFIX_TOKENS
    rotation = model.rotation(qwen_transformer.positions(grid, caption.shape[1]))
    lengths = jnp.array([image.shape[1] + num_ids])
    first, *others = model.transformer_blocks
    after, text = first(image, caption, rotation, lengths, of_blocks[0])

    def rest():
        x, y = after, text
        for block, of_both in zip(others, of_blocks[1:], strict=True):
            x, y = block(x, y, rotation, lengths, of_both)
        return np.asarray(x)[0]

    return Forward(
        before=np.asarray(image)[0],
        after_first=np.asarray(after)[0],
        rest=rest,
        velocity=lambda tokens: np.asarray(model.final(jnp.asarray(tokens)[None], modulations))[0],
    )


def flux_forward(model, latents, sigma, caption, num_ids, params):
    grid = params.height // 16, params.width // 16
    scale = jnp.array([params.guidance_scale], jnp.float32)
    modulations = model.modulate(jnp.array([sigma], jnp.float32), scale, caption.pooled)
    doubles = [
        (modulations.image[:, i], modulations.text[:, i])
        for i in range(len(model.transformer_blocks))
    ]
    image = model.x_embedder(jnp.asarray(latents)[None])
    rotation = model.rotation(grid, caption.text.shape[1])
    own = num_ids - golden_flux.GOLDEN.pipeline().pipeline.prefix_tokens
    lengths = jnp.array([image.shape[1] + own])
    T = image.shape[1]
    first, *others = model.transformer_blocks
    after, text = first(image, caption.text, rotation, lengths, doubles[0])

    def rest():
        x, y = after, text
        for block, of_both in zip(others, doubles[1:], strict=True):
            x, y = block(x, y, rotation, lengths, of_both)
        joint = jnp.concatenate([x, y], axis=1)
        for i, block in enumerate(model.single_transformer_blocks):
            joint = block(joint, rotation, lengths, modulations.single[:, i])
        return np.asarray(joint)[0, :T]

    return Forward(
        before=np.asarray(image)[0],
        after_first=np.asarray(after)[0],
        rest=rest,
        velocity=lambda tokens: np.asarray(model.final(jnp.asarray(tokens)[None], modulations))[0],
    )


FORWARDS = {
    golden_images.GOLDEN.name: z_image_forward,
    golden_flux.GOLDEN.name: flux_forward,
    golden_qwen_image.GOLDEN.name: qwen_image_forward,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """`latents` after each step; which steps were skipped; the changes, which the first lacks."""

    latents: list[np.ndarray]
    skipped: list[bool]
    changes: list[float]


def run(golden, request, threshold=None):
    """Returns the run of a request with given latents; `threshold` is used in place of its own."""
    image = request.image
    threshold = image.residual_diff_threshold if threshold is None else threshold
    size, model = (image.height, image.width), golden.pipeline()
    transformer = model.pipeline.parts.module("transformer", model.params)
    captions = [tuple(request.prompt_ids)]
    captions += [] if image.negative_ids is None else [image.negative_ids]
    encoded = [_encoded(golden, ids) for ids in captions]
    x = image.latents
    levels = golden.levels(image.num_inference_steps, size)
    held, skipped, changes, after = [None] * len(captions), [], [], []
    for step, (sigma, next_sigma) in enumerate(zip(levels, levels[1:], strict=False)):
        passes = [
            FORWARDS[golden.name](transformer, x, sigma, caption, len(ids), image)
            for caption, ids in zip(encoded, captions, strict=True)
        ]
        firsts = [one.after_first - one.before for one in passes]
        skips = False
        if step:
            change = max(
                float(np.abs(first - old).mean() / np.abs(old).mean())
                for first, (old, _) in zip(firsts, held, strict=True)
            )
            changes.append(change)
            skips = change < threshold
        if skips:
            outs = [one.after_first + rest for one, (_, rest) in zip(passes, held, strict=True)]
        else:
            outs = [one.rest() for one in passes]
            held = [
                (first, out - one.after_first)
                for first, out, one in zip(firsts, outs, passes, strict=True)
            ]
        velocities = [one.velocity(out) for one, out in zip(passes, outs, strict=True)]
        v = _guided(golden, velocities, sigma, image)
        x = (x + (next_sigma - sigma) * v).astype(np.float32)
        after.append(x)
        skipped.append(skips)
    return Run(latents=after, skipped=skipped, changes=changes)


def _encoded(golden, ids):
    model = golden.pipeline()
    padded = np.zeros((1, golden.tokens), np.int32)
    padded[0, : len(ids)] = ids
    return model.pipeline.encode(model.params, jnp.asarray(padded), jnp.array([len(ids)]))


def _guided(golden, velocities, sigma, image):
    if len(velocities) == 1:
        return velocities[0]
    given = {
        field.name: jnp.array([getattr(image, field.name)], jnp.float32)
        for field in dataclasses.fields(interface.Guidance)
    }
    positive, negative = (jnp.asarray(one)[None] for one in velocities)
    made = golden.pipeline().pipeline.guide(
        positive, negative, jnp.array([sigma], jnp.float32), interface.Guidance(**given)
    )
    return np.asarray(made)[0]
