"""Times the engine end to end on one device: closed batches of equal requests.

    python scripts/bench_engine.py --model-path configs/llada2.0-mini --load-format dummy \
        --batch 1,4,16 --prompt-len 512 --new-tokens 128

Prints one row per batch size: wall time, output tokens/s, decode forwards and their mean
time, and the distinct experts per layer that a 32-token block of random ids hits (random
weights say nothing about speed unless routing spreads as in a trained model).
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import numpy as np

import jdllm
from jdllm.layers import attention, moe
from jdllm.models import loading


def distinct_experts(model: loading.LoadedModel, tokens: np.ndarray) -> list[int]:
    """Returns how many experts one block of `tokens` [T] hits in each MoE layer."""

    def forward(params: dict[str, jax.Array], tokens: jax.Array) -> list[jax.Array]:
        module = loading.merge(model.graphdef, params)
        positions = jax.numpy.arange(tokens.shape[0], dtype=jax.numpy.int32)
        x, angles = module.embed(tokens, positions), module.angles(positions)
        attend = attention.dense_attend(np.ones((len(tokens), len(tokens)), bool), 1)
        chosen = []
        for layer in module.layers:
            out, _ = layer.attention(layer.input_layernorm(x), angles, attend=attend, cache=None)
            h = layer.post_attention_layernorm(x + out)
            if isinstance(layer.mlp, moe.SparseMoE):
                chosen.append(layer.mlp.router(h)[0])
            x = x + out + layer.mlp(h)
        return chosen

    return [len(np.unique(ids)) for ids in jax.jit(forward)(model.params, tokens)]


def main() -> None:
    """Parses the command line, runs every batch size, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--context-length", type=int, default=4096)
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch.split(",")]
    began = time.monotonic()
    engine = jdllm.Engine(
        model_path=args.model_path,
        load_format=args.load_format,
        dtype=args.dtype,
        context_length=args.context_length,
        max_running_requests=max(sizes),
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        dllm_algorithm="LowConfidence",
        dllm_algorithm_config={"threshold": args.threshold},
    )
    out = sys.stdout.write
    device = jax.local_devices()[0]
    out(f"# {' '.join(sys.argv)}\n# {device.device_kind}, jax {jax.__version__}, ")
    out(f"{engine.config.dtype}, start {time.monotonic() - began:.1f} s\n")
    rng = np.random.default_rng(0)
    block = rng.integers(0, engine.spec.vocab_size, 32).astype(np.int32)
    out(f"# distinct experts per layer, 32 tokens: {distinct_experts(engine.model, block)}\n")
    out("batch  wall s  tok/s  decode forwards  ms/forward  TPF\n")
    params = {"max_new_tokens": args.new_tokens, "ignore_eos": True}
    for size in sizes:
        shape = (size, args.prompt_len)
        prompts = rng.integers(0, engine.spec.vocab_size, shape).tolist()
        for _ in range(2):  # the first run warms every bucket it meets
            before, began = engine.stats(), time.monotonic()
            results = engine.generate(input_ids=prompts, sampling_params=params)
            wall = time.monotonic() - began
            launches = engine.stats().decode_launches_total - before.decode_launches_total
        tokens = sum(result["meta_info"]["completion_tokens"] for result in results)
        nfe = sum(result["meta_info"]["nfe"] for result in results)
        out(f"{size:5d} {wall:7.2f} {tokens / wall:6.0f} {launches:16d} ")
        out(f"{wall / launches * 1e3:11.2f} {tokens / nfe:5.2f}\n")
    engine.shutdown()


if __name__ == "__main__":
    main()
