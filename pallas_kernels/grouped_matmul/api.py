"""SwiGLU (or GeGLU) experts of a mixture-of-experts layer.

"xla" and "dense" are in `reference.py`; the GPU kernels are in `mosaic_gpu.py`. Gate and up rows of
`w_gate_up` are interleaved in groups (`gate_up.py`), so that one weight tile of a fused GPU kernel
holds gate and up of the same columns.

Shape letters: I width of an expert, J width of the shared expert, k experts of a token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import dispatch, lowered_once
from pallas_kernels.grouped_matmul import checks, mosaic_gpu, reference
from pallas_kernels.grouped_matmul.reference import Activation


def choose(
    implementation: str = "auto",
    *,
    dtype: DTypeLike,
    hidden_size: int,
    intermediate_size: int,
    activation: Activation = "silu",
) -> dispatch.Choice:
    """Returns which implementation serves this shape."""
    reason = mosaic_gpu.why_not(
        dtype=dtype,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
    )
    return dispatch.choose("grouped_matmul", implementation, refusals={"mosaic_gpu": reason})


def grouped_matmul(
    x: Float[Array, "T D"],
    w_gate_up: Float[Array, "E 2*I D"],  # interleaved
    w_down: Float[Array, "E D I"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float32[Array, "T k"],
    *,
    shared: tuple[Float[Array, "2*J D"], Float[Array, "D J"]] | None = None,  # interleaved; down
    valid: Bool[Array, " T"] | None = None,
    activation: Activation = "silu",
    implementation: str = "auto",
    out_dtype: DTypeLike = jnp.float32,
    experts_of_model: int | None = None,
) -> Float[Array, "T D"]:
    """Returns sum_k weight * expert(x), summed in float32, in `out_dtype`.

    Tokens that are not valid give zeros and use no expert, whatever they hold. The same holds for a
    (token, choice) pair with an expert id outside [0, E): a shard of the experts may get ids that
    it does not own. How many experts the model has, `experts_of_model` (default E), says how many
    rows an expert has. `shared` is an expert of every token, with weight 1; it is added to all
    rows, valid or not.
    """
    checks.check_shapes(x, w_gate_up, w_down, expert_ids, expert_weights, valid)
    checks.check_shared(x, shared)
    chosen = choose(
        implementation,
        dtype=x.dtype,
        hidden_size=x.shape[1],
        intermediate_size=w_down.shape[2],
        activation=activation,
    )
    return _grouped_matmul(
        x, w_gate_up, w_down, expert_ids, expert_weights, shared, valid,
        activation=activation, implementation=chosen.implementation, out_dtype=out_dtype,
        experts_of_model=experts_of_model,
    )  # fmt: skip


@functools.partial(
    jax.jit, static_argnames=("activation", "implementation", "out_dtype", "experts_of_model")
)
def _grouped_matmul(
    x, w_gate_up, w_down, expert_ids, expert_weights, shared, valid, *, activation, implementation,
    out_dtype, experts_of_model,
) -> jax.Array:  # fmt: skip
    arguments = (x, w_gate_up, w_down, expert_ids, expert_weights.astype(jnp.float32))
    if implementation == "mosaic_gpu":
        run = functools.partial(
            lowered_once.call, mosaic_gpu.grouped_matmul, *arguments, valid=valid,
            activation=activation, experts_of_model=experts_of_model,
        )  # fmt: skip
        if shared is None or shared[1].shape == w_down.shape[1:]:
            return run(shared=shared, out_dtype=out_dtype)
        out = run()
        if (
            mosaic_gpu.why_not(
                dtype=x.dtype, hidden_size=x.shape[1], intermediate_size=shared[1].shape[1]
            )
            is None
        ):
            return (out + _of_one_expert(x, *shared, activation)).astype(out_dtype)
    else:
        used = (expert_ids >= 0) & (expert_ids < w_gate_up.shape[0])  # [T, k]
        if valid is not None:
            used &= valid[:, None]
        out = (reference.all_experts if implementation == "dense" else reference.in_rounds)(
            *arguments, used, activation
        )
    if shared is not None:
        out = out + reference.swiglu(x, *shared, activation)
    return out.astype(out_dtype)


def _of_one_expert(
    x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, activation: Activation
) -> jax.Array:
    """Returns the float32 output of an expert of another width than the routed ones."""
    ids = jnp.zeros((x.shape[0], 1), jnp.int32)
    return lowered_once.call(
        mosaic_gpu.grouped_matmul, x, w_gate_up[None], w_down[None], ids,
        jnp.ones(ids.shape, jnp.float32), activation=activation,
    )  # fmt: skip
