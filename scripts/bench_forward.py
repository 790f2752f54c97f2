"""Times one denoising forward, or one prefill launch, of a whole model with random weights.

    python scripts/bench_forward.py --config configs/llada2.0-mini \
        --batch 1,4,16,64 --context 512,4096
    python scripts/bench_forward.py --config configs/bench/llada-8b-shapes \
        --batch 1,4,16 --context 512
    python scripts/bench_forward.py --config configs/llada2.0-mini --prefill 2048 --batch 8

    python scripts/bench_forward.py --config configs/diffusion-gemma-26b-a4b \
        --batch 1,4,16 --context 512

A denoising forward embeds one block per row, runs every layer over the paged pool with `context`
cached tokens per row, and streams the vocabulary for the statistics of every token. Several
forwards run in one compiled loop; each chooses the tokens of the next, as in serving. The time is
the median loop over its forwards. `floors.py` defines the floors. With random weights routing is
about uniform; the number of experts used per layer is printed. `configs/bench/llada-8b-shapes` has
the shapes of LLaDA-8B in the LLaDA2 family, with every layer dense (and with q and k norms, which
LLaDA-8B lacks). A denoising forward of a model without a mask token (DiffusionGemma) is that of its
serving step: a canvas per row with what the forward before expected, its logits row by row, draws
and the next mixture of embeddings.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from typing import Any

import floors
import jax
import jax.numpy as jnp
import kernel_profile
import numpy as np
from tqdm import tqdm

from jdllm.kv_cache.pool import PoolConfig, choose_page_size, create
from jdllm.layers import attention
from jdllm.models import loading
from jdllm.runner import expert_use
from jdllm.runner.config import StepConfig
from jdllm.runner.uniform import forward as uniform_forward
from jdllm.runner.uniform import noise, reading
from jdllm.scheduler.rows import uniform

_QUEUED = 3
# Named scopes of the model's parts, and the heading under which their kernels are added up.
GROUPS = {
    "qkv": "dense",
    "attend": "attention",
    "attention_out": "dense",
    "router": "router",
    "experts": "moe",  # the shared expert is one of them
    "mlp": "dense",
    "head": "head",
    "mixture": "mixture",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows of `new_tokens` in-flight tokens after `context` cached ones."""

    rows: int
    new_tokens: int
    context: int
    page_size: int

    @property
    def tokens(self) -> int:
        return self.rows * self.new_tokens

    @property
    def pages_per_row(self) -> int:
        return -(-(self.context + self.new_tokens) // self.page_size)

    @property
    def page_table(self) -> jax.Array:
        """The pages of each row, spread over the pool."""
        pages = jnp.arange(self.rows * self.pages_per_row, dtype=jnp.int32)
        return pages.reshape(self.pages_per_row, self.rows).T


def forward(
    model_of: Any, shape: Shape, implementation: str, params: Any, pools: Any, tokens: jax.Array
) -> tuple[Any, Any]:
    """Returns (hidden [T, D], pools) of packed rows; a row's pages are spread over the pool."""
    spec, R, L = model_of.spec, shape.rows, shape.new_tokens
    positions = jnp.tile(shape.context + jnp.arange(L, dtype=jnp.int32), R)
    row = jnp.repeat(jnp.arange(R, dtype=jnp.int32), L)
    page_table = shape.page_table
    page = page_table[row, positions // shape.page_size]
    batch = attention.PagedBatch(
        cu_q_lens=jnp.arange(R + 1, dtype=jnp.int32) * L,
        context_lens=jnp.full((R,), shape.context, jnp.int32),
        kv_lens=jnp.full((R,), shape.context + L, jnp.int32),
        page_table=page_table,
        kv_indices=page * shape.page_size + positions % shape.page_size,
    )
    block_size = spec.diffusion.block_size
    if spec.diffusion.kind == "uniform":  # context, which is encoded in whole tiles
        block_size = uniform.tile_of(block_size)
    attend = attention.paged_attend(
        batch,
        visibility=spec.diffusion.attention_pattern,
        block_size=block_size,
        q_len=L if block_size == L else None,
        implementation=implementation,
    )
    model = loading.merge(model_of.graphdef, params)
    valid = jnp.ones((shape.tokens,), bool)
    return model(tokens, positions, attend=attend, caches=pools, valid=valid)


def denoise(
    model_of: Any, shape: Shape, implementation: str, count: int, params: Any, pools: Any,
    tokens: jax.Array,
) -> tuple[Any, jax.Array]:  # fmt: skip
    """Runs `count` forwards; the tokens of each are the best ids of the forward before."""
    mask_id = model_of.spec.diffusion.mask_token_id

    def step(_: Any, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        pools, tokens = state
        hidden, pools = forward(model_of, shape, implementation, params, pools, tokens)
        with jax.named_scope("head"):
            stats = (
                loading.merge(model_of.graphdef, params)
                .unembedding()
                .stats(
                    hidden,
                    forbidden_ids=(mask_id,),
                    given_ids=tokens,
                    implementation=implementation,
                )
            )
        return pools, stats.best_id

    return jax.lax.fori_loop(0, count, step, (pools, tokens))


def denoise_canvases(
    model_of: Any, shape: Shape, implementation: str, count: int, params: Any, pools: Any,
    state: tuple[jax.Array, jax.Array],
) -> tuple[Any, tuple[jax.Array, jax.Array]]:  # fmt: skip
    """Runs `count` steps of one canvas per row; each draws the next and what it expects.

    `state` holds the canvases [R, L] and the mixtures of embeddings [R, L, D].
    """
    R, L = shape.rows, shape.new_tokens
    config = StepConfig(
        spec=model_of.spec,
        pool=_pool_config(model_of.spec, shape, str(pools[0].dtype)),
        context_length=shape.context,
        num_slots=R,
        algorithms=(),
        implementation=implementation,
    )
    model = uniform_forward.model_of(model_of.graphdef, params)
    context, is_active = jnp.full((R,), shape.context, jnp.int32), jnp.ones((R,), bool)
    positions = jnp.broadcast_to(shape.context + jnp.arange(L, dtype=jnp.int32), (R, L))
    seed = jnp.zeros((R, 2), jnp.uint32)

    def step(i: jax.Array, carry: tuple[Any, tuple[jax.Array, jax.Array]]):
        pools, (canvas, expected) = carry
        hidden, pools = uniform_forward.forward_canvases(
            config, model, pools, canvas, expected, context, is_active, shape.page_table
        )
        keys = noise.draw_keys(seed, positions, jnp.full((R,), i, jnp.int32))
        found = reading.read(model, hidden, jnp.full((R,), 0.8), keys, is_active)
        return pools, (found.drawn, found.expected)

    return jax.lax.fori_loop(0, count, step, (pools, state))


def prefill(
    model_of: Any, shape: Shape, implementation: str, count: int, params: Any, pools: Any,
    tokens: jax.Array,
) -> tuple[Any, jax.Array]:  # fmt: skip
    """Runs `count` prefill launches; only the pool is kept, so the last layer ends at K,V."""

    def step(_: Any, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        pools, tokens = state
        _, pools = forward(model_of, shape, implementation, params, pools, tokens)
        changed = pools[-1][0, 0, 0, 0, 0] > 0  # so each launch depends on the one before
        return pools, (tokens + 1 + changed.astype(jnp.int32)) % model_of.spec.vocab_size

    return jax.lax.fori_loop(0, count, step, (pools, tokens))


def run_shape(model: Any, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Compiles, times and (if asked) profiles one shape."""
    spec = model.spec
    pools = create(_pool_config(spec, shape, args.dtype))
    random = np.random.default_rng(0)
    tokens = random.integers(0, spec.vocab_size, shape.tokens).astype(np.int32)
    pools = [
        jax.random.normal(jax.random.key(i), pool.shape, pool.dtype) for i, pool in enumerate(pools)
    ]
    run = prefill if args.prefill else denoise
    if spec.diffusion.kind == "uniform" and not args.prefill:
        run, tokens = denoise_canvases, _first_canvases(tokens, shape, spec, args.dtype)
    model_of = _Static(model)
    bound = functools.partial(run, model_of, shape, args.implementation, args.forwards)
    began = time.monotonic()
    lowered = jax.jit(bound, donate_argnums=(1,)).lower(model.params, pools, tokens)
    compiled = lowered.compile()
    compile_s = time.monotonic() - began
    tokens = jax.device_put(tokens)
    times = []
    for _ in range(args.repeats + 2):  # the first two warm up: launches, then captured graphs
        began = time.perf_counter()
        for _ in range(_QUEUED):  # a launch with hundreds of arrays takes a millisecond itself
            pools, tokens = compiled(model.params, pools, tokens)
        jax.block_until_ready((pools, tokens))
        times.append((time.perf_counter() - began) * 1e3 / (args.forwards * _QUEUED))
    found: dict[str, Any] = {"ms": float(np.median(times[2:])), "compile_s": compile_s}
    memory = compiled.memory_analysis()
    assert memory is not None  # GPUs and CPUs report it
    found["temp_mb"] = memory.temp_size_in_bytes / 1e6
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    found["peak_gb"] = peak / 1e9
    if args.profile:
        # The kernels of a captured graph do not name their instruction.
        plain = lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
        state = list(plain(model.params, pools, tokens))

        def once() -> None:
            state[:] = plain(model.params, *state)
            jax.block_until_ready(state)

        found["profile"] = kernel_profile.profile(
            once, plain.as_text() or "", GROUPS, args.forwards
        )
    return found


def _pool_config(spec: Any, shape: Shape, dtype: str) -> PoolConfig:
    return PoolConfig(
        num_pages=shape.rows * shape.pages_per_row,
        page_size=shape.page_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        kv_heads_of_layers=spec.kv_heads_of_layers,
    )


def _first_canvases(
    tokens: np.ndarray, shape: Shape, spec: Any, dtype: str
) -> tuple[np.ndarray, jax.Array]:
    """Returns canvases of random tokens, which expect nothing yet."""
    canvas = tokens.reshape(shape.rows, shape.new_tokens)
    return canvas, jnp.zeros((*canvas.shape, spec.hidden_size), dtype)


class _Static:
    """The static half of a model: hashable by identity, holds no arrays."""

    def __init__(self, model: loading.LoadedModel):
        self.graphdef, self.spec, self.config = model.graphdef, model.spec, model.config


def main() -> None:
    """Parses the command line, runs every shape, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="directory that holds config.json")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--context", default="512")
    parser.add_argument("--prefill", type=int, help="prompt tokens a row; times prefill instead")
    parser.add_argument("--page-size", type=int, help="by default what serving takes")
    parser.add_argument("--block-size", type=int, default=32, help="of models that have no canvas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", default="auto", help="auto or xla")
    parser.add_argument("--forwards", type=int, default=8, help="forwards in one compiled loop")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="kernel time by part of the model")
    parser.add_argument("--top", type=int, default=0, help="with --profile: longest kernels listed")
    args = parser.parse_args()
    # The length of a canvas is the model's own.
    is_canvas = loading.read_spec(args.config).diffusion.kind == "uniform"
    model = loading.load(
        args.config,
        dtype=args.dtype,
        load_format="dummy",
        block_size=None if is_canvas else args.block_size,
        implementation=args.implementation,
    )
    block = model.spec.diffusion.block_size
    model = dataclasses.replace(model, params=loading.serving_params(model.params, args.dtype))
    device, out = jax.local_devices()[0], sys.stdout.write
    floors.measured_on(device.device_kind)
    out(f"# {' '.join(sys.argv)}\n# {device.device_kind}, jax {jax.__version__}, {args.dtype}\n")
    page_size = choose_page_size(block, args.page_size)
    batches = [int(size) for size in args.batch.split(",")]
    contexts = [0] if args.prefill else [int(size) for size in args.context.split(",")]
    shapes = [
        Shape(rows=rows, new_tokens=args.prefill or block, context=context, page_size=page_size)
        for context in contexts
        for rows in batches
    ]
    header = "batch context tokens experts  ms      floor  ratio  peak GB  temp MB  compile s"
    out(header + ("  TFLOP/s  share  tokens/s" if args.prefill else "") + "\n")
    for shape in tqdm(shapes, disable=None):
        work = floors.forward(
            model.config, rows=shape.rows, new_tokens=shape.new_tokens, context=shape.context,
            head=not args.prefill,
        )  # fmt: skip
        sample = np.random.default_rng(0).integers(
            0, model.spec.vocab_size, min(shape.tokens, 2048)
        )
        hit = expert_use.distinct_experts(model, sample.astype(np.int32))
        found = run_shape(model, shape, args)
        floor = floors.total_floor_ms(work)
        out(
            f"{shape.rows:5d} {shape.context:7d} {shape.tokens:6d} {np.mean(hit or [0]):7.1f} "
            f"{found['ms']:7.3f} {floor:7.3f} {found['ms'] / floor:5.2f} {found['peak_gb']:8.1f} "
            f"{found['temp_mb']:8.0f} {found['compile_s']:9.1f}"
        )
        if args.prefill:
            rate = sum(part.flops for part in work.values()) / found["ms"] / 1e9
            out(f"  {rate:7.0f} {rate / floors.FLOPS_PER_S * 1e14:5.1f}%")
            out(f"  {shape.tokens / found['ms'] * 1e3:8.0f}")
        out("\n")
        if args.profile:
            _print_profile(found["profile"], work, args.top)
        sys.stdout.flush()


def _print_profile(profile: kernel_profile.Profile, work: dict[str, floors.Work], top: int) -> None:
    """Prints the kernel time of each group beside its floor, then the longest kernels."""
    out = sys.stdout.write
    groups: dict[str, float] = {}
    for scope, ms in profile.by_scope.items():
        group = GROUPS.get(scope, "other")
        groups[group] = groups.get(group, 0.0) + ms
    parts = [
        f"{name} {ms:.3f}" + (f" (floor {work[name].floor_ms:.3f})" if name in work else "")
        for name, ms in sorted(groups.items(), key=lambda item: -item[1])
    ]
    out(f"      kernels {profile.busy_ms:.3f} ms in {profile.launches} launches: ")
    out(", ".join(parts) + "\n")
    for scope, name, ms, launches in profile.by_kernel[:top]:
        out(f"        {ms:7.4f} ms {launches:5d}x  {scope:14s} {name}\n")


if __name__ == "__main__":
    main()
