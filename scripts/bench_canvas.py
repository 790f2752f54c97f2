"""Full-attention models: milliseconds per forward and tokens/s at a stated number of tokens a step.

    python scripts/bench_canvas.py --model-path configs/llada-8b --tokens-per-forward 9.91 8.56 8.56

With random weights a step accepts no more tokens than by chance, so this script replays the
acceptance: its algorithm plans as `FullAttnMultiBlock` does (blocks, caches, windows) and accepts
`threshold` tokens a step in the order of their positions, whatever the model says. Everything else
is the real engine: scheduler, launches, forwards, vocabulary statistics.

The floor counts the tokens that are really forwarded, step by step, for all rows together
(`floors.py`: bytes or FLOPs of the whole forward, the LM head for the positions that need it). A
separate loop on the host computes these tokens, and the engine's counts check it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import floors
import jax.numpy as jnp
import numpy as np

from jdllm import decoding
from jdllm.bench import in_process
from jdllm.decoding.canvas import full_attn_multi_block, rules
from jdllm.decoding.canvas.interface import Canvas, CanvasProposal
from jdllm.engine.engine import Engine
from jdllm.options import config, sampling_params

BLOCK = 32
NEVER = 10**6
# (name, (cache_mode, cache_delay_iter, refresh_interval)).
MODES = (
    ("exact", ("exact", 1, NEVER)),
    ("delayed 1, no refresh", ("delayed", 1, NEVER)),
    ("delayed 2, refresh 3", ("delayed", 2, 3)),
    ("window 1, no refresh", ("window", 1, NEVER)),
    ("window 2, refresh 3", ("window", 2, 3)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Replay(full_attn_multi_block.FullAttnMultiBlock):
    """`FullAttnMultiBlock`, but it accepts `threshold` tokens a step on average, in order."""

    def update(self, canvas: Canvas, proposal: CanvasProposal) -> Canvas:
        step, rate = canvas.step, canvas.params.threshold
        count = jnp.maximum(jnp.floor((step + 1) * rate) - jnp.floor(step * rate), 1)
        created_end = rules.block_start(canvas, canvas.extra.created)
        eligible = canvas.masked & (canvas.positions < created_end[:, None])
        rank = jnp.cumsum(eligible, axis=1) - 1
        # Reads the statistics, so that XLA must compute them.
        is_real = ~jnp.isnan(proposal.entropy)
        return canvas.write(proposal.tokens, where=eligible & is_real & (rank < count[:, None]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """For each step of a row: the tokens it forwards, and the positions that need statistics."""

    tokens: list[int]
    wanted: list[int]
    num_full: int


def schedule(
    prompt: int, output: int, rate: float, mode: str, delay: int, refresh: int
) -> Schedule:
    """Returns the steps of one row, by a loop over its blocks."""
    num_blocks = output // BLOCK
    left, finished_at = [BLOCK] * num_blocks, [NEVER] * num_blocks
    length, created, cached, step = prompt + output, 0, 0, 0
    tokens, wanted, num_full = [], [], 0
    while any(left):
        step += 1
        if created < num_blocks and (created == 0 or left[created - 1] <= 0.9 * BLOCK):
            created += 1
        before, waits = cached, False
        if cached == 0 and step >= delay:
            cached = prompt
        while prompt <= cached < length and left[at := (cached - prompt) // BLOCK] == 0:
            finished_at[at] = min(finished_at[at], step)
            if step - finished_at[at] < delay:
                waits = True
                break
            cached += BLOCK
        waits = waits and cached == before
        created_end = prompt + created * BLOCK
        is_window = mode == "window"
        is_full = mode == "exact" or step % refresh == 0 or (step == 1 if is_window else waits)
        low = 0 if is_full else before
        high = created_end if is_window and not is_full else length
        num_full += low == 0 and high == length
        tokens.append(high - low)
        wanted.append(sum(left[:created]))
        taken = max(1, int(step * rate) - int((step - 1) * rate))
        for at in range(created):
            part = min(taken, left[at])
            left[at] -= part
            taken -= part
    return Schedule(tokens=tokens, wanted=wanted, num_full=num_full)


def floor_ms(model: Engine, rows: int, length: int, steps: Schedule) -> float:
    """Returns the floor in milliseconds of all steps of `rows` equal rows."""
    spec, width = model.spec, model.model.config.layers[0].feed_forward.width
    D, H = spec.hidden_size, spec.head_dim
    q_width, kv_width = spec.num_query_heads * H, spec.num_kv_heads * H
    linear = spec.num_layers * (D * (q_width + 2 * kv_width) + q_width * D + 3 * D * width)
    total = 0.0
    for tokens, wanted in zip(steps.tokens, steps.wanted, strict=True):
        work = floors.matmul(rows * tokens, linear)
        work += floors.matmul(rows * wanted, spec.vocab_size * D)
        work += floors.attention(  # of all layers
            scores=spec.num_layers * rows * tokens * length,
            kv_tokens=spec.num_layers * rows * length,
            query_heads=spec.num_query_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=H,
        )
        total += work.floor_ms
    return total


def main() -> None:
    """Parses the command line, measures every mode at every number of rows, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--tokens-per-forward", type=float, nargs="+", required=True, help="one per batch size"
    )
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if len(args.batch_size) != len(args.tokens_per_forward):
        parser.error("--tokens-per-forward takes one number per batch size")
    if args.output_len % BLOCK:
        parser.error(f"--output-len must be a multiple of {BLOCK}")
    decoding.CANVAS_ALGORITHMS["FullAttnMultiBlock"] = decoding.Variants(
        Replay(), Replay(is_shifted=True)
    )
    out, began = sys.stdout.write, time.monotonic()
    engine_config = config.EngineConfig(
        model_path=args.model_path,
        load_format=args.load_format,
        context_length=args.input_len + args.output_len,
        max_running_requests=max(args.batch_size),
        skip_tokenizer_init=True,
        tp_size=args.tp_size,
        log_level="warning",
    )
    with in_process.open_engine(engine_config) as engine:
        out(f"{in_process.headline(in_process.surroundings(engine))}\n")
        floors.measured_on(str(engine.device))
        out(f"# ready in {time.monotonic() - began:.0f} s; acceptance is replayed\n")
        out(
            "rows mode                    tok/s   TPF  NFE  ms/NFE  floor  ratio  tokens/NFE  "
            "full  padding  first block ms\n"
        )
        rng = np.random.default_rng(args.seed)
        for rows, rate in zip(args.batch_size, args.tokens_per_forward, strict=True):
            for name, mode in MODES:
                out(f"{rows:4d} {name:22s} {measure(engine, rng, args, rows, rate, mode)}\n")
                sys.stdout.flush()


def measure(
    engine: Engine,
    rng: np.random.Generator,
    args: argparse.Namespace,
    rows: int,
    rate: float,
    mode: tuple[str, int, int],
) -> str:
    """Returns the figures of one closed batch: the median of `repeats` runs after a warm-up."""
    cache_mode, delay, refresh = mode
    params = sampling_params.SamplingParams(
        max_new_tokens=args.output_len,
        temperature=0.0,
        ignore_eos=True,
        dllm=sampling_params.DllmParams(
            threshold=rate,
            cache_mode=cache_mode,
            cache_delay_iter=delay,
            refresh_interval=refresh,
        ),
    )
    counters = engine._built.core.counters
    runs = []
    for _ in range(args.repeats + 1):
        prompts = in_process.random_ids(rng, engine, rows, args.input_len)
        before = dataclasses.asdict(counters)
        records, seconds = in_process.generate(engine, prompts, [params] * rows)
        after = dataclasses.asdict(counters)
        runs.append((seconds, records, {name: after[name] - before[name] for name in after}))
    seconds, records, counts = sorted(runs[1:], key=lambda run: run[0])[args.repeats // 2]
    steps = schedule(args.input_len, args.output_len, rate, *mode)
    nfe = len(steps.tokens)
    measured = counts["real_positions"] / rows
    if records[0].nfe != nfe or measured != sum(steps.tokens):
        raise RuntimeError(f"{mode}: {records[0].nfe=} {nfe=}, {measured=} {sum(steps.tokens)=}")
    floor = floor_ms(engine, rows, args.input_len + args.output_len, steps) / nfe / args.tp_size
    each = seconds / nfe * 1e3
    first = statistics.median(record.ttft_s for record in records) * 1e3
    tokens = args.output_len
    return (
        f"{rows * tokens / seconds:6.0f} {tokens / nfe:5.2f} {nfe:4d} {each:7.2f} {floor:6.2f} "
        f"{each / floor:6.2f} {sum(steps.tokens) / nfe:11.0f} {steps.num_full / nfe:5.2f} "
        f"{1 - counts['real_positions'] / counts['computed_positions']:8.1%} {first:8.1f}"
    )


if __name__ == "__main__":
    main()
