"""SwiGLU experts of a mixture-of-experts layer.

"xla" and "dense" are in `reference.py`; the GPU kernels are in `mosaic_gpu.py`. Gate and up rows of
`w_gate_up` are interleaved in groups (`gate_up.py`), so that one weight tile of a fused GPU kernel
holds both halves of the columns it finishes.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.grouped_matmul import checks, reference
from pallas_kernels.grouped_matmul import mosaic_gpu as gpu_kernel


def choose(
    implementation: str = "auto", *, dtype, hidden_size: int, intermediate_size: int
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = gpu_kernel.why_not(
        dtype=dtype, hidden_size=hidden_size, intermediate_size=intermediate_size
    )
    return dispatch.choose("grouped_matmul", implementation, refusals={"mosaic_gpu": reason})


def grouped_matmul(
    x: jax.Array,  # [T, D]
    w_gate_up: jax.Array,  # [E, 2 * I, D], interleaved
    w_down: jax.Array,  # [E, D, I]
    expert_ids: jax.Array,  # int32 [T, k]
    expert_weights: jax.Array,  # float32 [T, k]
    *,
    shared: tuple[jax.Array, jax.Array] | None = None,  # [2 * I', D] interleaved, [D, I']
    valid: jax.Array | None = None,  # bool [T]
    implementation: str = "auto",
    out_dtype=jnp.float32,
) -> jax.Array:
    """Returns sum_k weight * expert(x), summed in float32, as [T, D] of `out_dtype`.

    Tokens that are not valid give zeros and touch no expert, whatever they hold. So does a pair
    whose expert id lies outside [0, E): a shard of the experts may pass ids it does not own.
    `shared`, an expert of every token at weight 1, is added to all rows, valid or not.
    """
    checks.check_shapes(x, w_gate_up, w_down, expert_ids, expert_weights, valid)
    checks.check_shared(x, shared)
    chosen = choose(
        implementation, dtype=x.dtype, hidden_size=x.shape[1], intermediate_size=w_down.shape[2]
    )
    return _grouped_matmul(
        x, w_gate_up, w_down, expert_ids, expert_weights, shared, valid,
        implementation=chosen.implementation, out_dtype=out_dtype,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("implementation", "out_dtype"))
def _grouped_matmul(
    x, w_gate_up, w_down, expert_ids, expert_weights, shared, valid, *, implementation, out_dtype
) -> jax.Array:
    arguments = (x, w_gate_up, w_down, expert_ids, expert_weights.astype(jnp.float32))
    if implementation == "mosaic_gpu":
        run = functools.partial(
            lowered_once.call, gpu_kernel.grouped_matmul, *arguments, valid=valid
        )
        if shared is None or shared[1].shape == w_down.shape[1:]:
            return run(shared=shared, out_dtype=out_dtype)
        out = run()
    else:
        used = (expert_ids >= 0) & (expert_ids < w_gate_up.shape[0])  # [T, k]
        if valid is not None:
            used &= valid[:, None]
        out = (reference.all_experts if implementation == "dense" else reference.in_rounds)(
            *arguments, used
        )
    if shared is not None:
        out = out + reference.swiglu(x, *shared)
    return out.astype(out_dtype)
