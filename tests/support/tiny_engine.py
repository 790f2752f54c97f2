"""An engine over the tiny reference checkpoint (random weights, block 8)."""

import contextlib
import pathlib
from unittest import mock

import jax
import numpy as np

import jdllm
from jdllm.device import facts
from jdllm.scheduler.rows import block

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada2"
VOCAB, BLOCK = 320, 8
# The same geometry with routing of blocks, and the rule that inserts and deletes.
LLADA22 = {
    "model_path": str(GOLDEN.parent / "llada22"),
    "dllm_algorithm": "JointThresholdInDel,LowConfidence",
    "max_running_requests": 2,
}
# Options of an engine with shifted logits, whose steps forward parts of blocks.
SHIFTED = {
    "model_path": str(GOLDEN.parent / "fast_dllm_v2"),
    "dllm_algorithm": "HierarchyBlock",
    "dllm_algorithm_config": {"threshold": 0.05, "small_block_size": 4, "use_block_cache": True},
}


def make_engine(*, with_logits=False, **options):
    """Returns an engine; only `with_logits` serves requests that need their logits.

    Their launches have programs of their own, which take time to compile. So does every number of
    rows: as on a GPU there are launches of 1 and 4 rows, and none of 2.
    """
    defaults = {
        "model_path": str(GOLDEN),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "dllm_algorithm": "LowConfidence,JointThreshold",
        "dllm_algorithm_config": {"threshold": 0.3, "block_size": BLOCK},
        "max_running_requests": 4,
        "context_length": 128,
        "chunked_prefill_size": 32,
        "page_size": 16,
        # Stated, so that two engines fit on an accelerator: by default one takes its memory.
        "max_total_tokens": 4 * 128,
    }
    # The default matmul precision is read when steps are traced, in Engine().
    no_sizes = mock.patch.object(block.BlockBuckets, "logit_rows", ())
    sizes = contextlib.nullcontext() if with_logits else no_sizes
    few = mock.patch.object(facts.DeviceFacts, "padding_is_cheap", True)
    with sizes, few, jax.default_matmul_precision("highest"):
        return jdllm.Engine(**defaults | options)


def assert_nothing_held(engine):
    scheduler = engine._built.core.scheduler
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)
    allocator = scheduler.pages.allocator
    assert allocator.num_free + stats.num_cached_pages == allocator.num_pages


def random_prompts(seed, count, longest=60, vocab=VOCAB):
    """Returns prompts of random lengths; every second one begins like the others."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, 40).tolist()
    prompts = []
    for i in range(count):
        own = rng.integers(0, vocab, rng.integers(1, longest)).tolist()
        prompts.append((shared + own)[:longest] if i % 2 else own)
    return prompts


def answers(results):
    """Returns what must not depend on how requests are batched."""
    return [
        (r["output_ids"], r["meta_info"]["finish_reason"], r["meta_info"].get("step_map"))
        for r in results
    ]


def alone(engine, prompts, params):
    """Returns the results of one request after the other."""
    return [
        engine.generate(input_ids=prompt, sampling_params=one)
        for prompt, one in zip(prompts, params, strict=True)
    ]
