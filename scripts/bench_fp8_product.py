"""Times products in 8-bit floats alone, under held load, beside those in bfloat16.

    python scripts/bench_fp8_product.py --tokens 1536 6144 --shapes 21504x3072 3072x15360

A shape is COLUMNSxCONTRACTION; those by default are of FLUX.1's blocks, and 1,536 tokens are one
image of 512x512 with its caption. `fp8` multiplies operands that are quantised already, into
float32 or into bfloat16: what they gain over `bf16` bounds what `--quantization fp8` can gain.
`fp8_matmul` is the op as models call it, which quantises its tokens and scales the result;
`by float32` is the same with a result in float32 before it is scaled. Each line is one launch after
another for `--timed-s` seconds, after `--warm-s` of the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import bench_image_parts as parts
import jax
import jax.numpy as jnp

import pallas_kernels
from jdllm.bench import tables
from pallas_kernels.fp8_matmul import reference

SHAPES = ("21504x3072", "3072x15360", "9216x3072", "12288x3072", "3072x12288")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1536, 6144])
    parser.add_argument(
        "--shapes", type=parts.parse_point, nargs="+", metavar="COLUMNSxCONTRACTION"
    )
    parts.add_timing_flags(parser)
    options = parser.parse_args()
    shapes = options.shapes or [parts.parse_point(shape) for shape in SHAPES]
    tables.say(f"# {jax.devices()[0].device_kind}, held load")
    tables.say("tokens  columns  contraction  product            us  TFLOP/s  of bf16")
    for tokens in options.tokens:
        for columns, contraction in shapes:
            plain_us = None
            for name, (step, arguments) in cases(tokens, columns, contraction).items():
                us = 1e3 * parts.time_steps(step, arguments, options).ms
                plain_us = plain_us or us
                rate = 2 * tokens * columns * contraction / us / 1e6
                tables.say(
                    f"{tokens:6d} {columns:8d} {contraction:12d}  {name:14s} {us:8.1f} "
                    f"{rate:8.0f} {plain_us / us:7.2f}x"
                )


def cases(
    tokens: int, columns: int, contraction: int
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns each product as a step: the last argument is the array of its result."""
    x = jax.random.normal(jax.random.key(0), (tokens, contraction), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (columns, contraction), jnp.bfloat16)
    few, many = reference.quantize_rows(x), reference.quantize_rows(w)
    out = jnp.zeros((tokens, columns), jnp.bfloat16)
    wide = jnp.zeros((tokens, columns), jnp.float32)
    return {
        "bf16": (product, (x, w, out)),
        "fp8 to float32": (product, (few.values, many.values, wide)),
        "fp8 to bf16": (product, (few.values, many.values, jnp.copy(out))),
        "fp8_matmul": (whole, (x, many.values, many.scale, jnp.copy(out))),
        "by float32": (by_float32, (x, many.values, many.scale, jnp.copy(out))),
    }


def product(x: jax.Array, w: jax.Array, before: jax.Array) -> jax.Array:
    return reference.fp8_product(x, w, before.dtype)  # the dot is that of any dtype


def whole(x: jax.Array, w: jax.Array, scale: jax.Array, before: jax.Array) -> jax.Array:
    return pallas_kernels.fp8_matmul(x, w, scale, out_dtype=before.dtype)


def by_float32(x: jax.Array, w: jax.Array, scale: jax.Array, before: jax.Array) -> jax.Array:
    values, of_x = reference.quantize_rows(x)
    found = reference.fp8_product(values, w, jnp.float32)
    return reference.scaled(found, of_x, scale, before.dtype)


if __name__ == "__main__":
    main()
