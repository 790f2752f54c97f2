"""Which ops of published models run as kernels on Hopper, whatever the block size, and why not."""

import json
import pathlib

import jax.numpy as jnp
import pytest
from support import devices

from jdllm.kv_cache import pool
from jdllm.models import registry
from jdllm.runner.block import sizes
from pallas_kernels.add_rms_norm import api
from pallas_kernels.dense_matmul import api as dense_matmul
from pallas_kernels.dense_matmul.mosaic_gpu import MAX_TOKENS
from pallas_kernels.extend_attention import api as extend_attention
from pallas_kernels.grouped_matmul import api as grouped_matmul
from pallas_kernels.rotate_and_cache import api as rotate_and_cache
from pallas_kernels.top_k_routing import api as top_k_routing
from pallas_kernels.unembed_stats import api as unembed_stats

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
DTYPE = jnp.dtype(jnp.bfloat16)


def special_ids(diffusion):
    """Returns the tokens that stay out of the streamed vocabulary."""
    edits = diffusion.edit_tokens
    return (diffusion.mask_token_id, *((edits.delete, edits.split) if edits else ()))


def choices_of(name, *, rows, block_size):
    """Returns the choice of each op in a decode step of `rows` rows."""
    hf = json.loads((CONFIGS / name / "config.json").read_text())
    config = registry.family(registry.architecture_of(hf)).parse_config(hf, block_size=block_size)
    spec, tokens = config.spec, rows * block_size
    width = spec.num_query_heads * spec.head_dim
    found = {
        "add_rms_norm": api.choose(dtype=DTYPE, width=spec.hidden_size),
        "extend_attention": extend_attention.choose(
            dtype=DTYPE,
            head_dim=spec.head_dim,
            page_size=pool.choose_page_size(block_size, None),
            block_size=block_size,
            q_heads=spec.num_query_heads,
            kv_heads=spec.num_kv_heads,
            visibility=spec.diffusion.attention_pattern.value,
            tokens=tokens,
            rows=rows,
        ),
        "rotate_and_cache": rotate_and_cache.choose(
            dtype=DTYPE, pool_dtype=DTYPE, head_dim=spec.head_dim, rotary_dim=spec.rotary_dim
        ),
        "unembed_stats": unembed_stats.choose(
            dtype=DTYPE, hidden_size=spec.hidden_size, forbidden_ids=special_ids(spec.diffusion)
        ),
    }
    columns = {
        "w_qkv": (width + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        "w_out": (spec.hidden_size, width),
    }
    if spec.moe is None:
        inner = config.layers[0].feed_forward.width
        columns |= {"w_gate_up": (2 * inner, spec.hidden_size), "w_down": (spec.hidden_size, inner)}
    else:
        router = config.layers[-1].feed_forward.router
        found["top_k_routing"] = top_k_routing.choose(
            num_experts=router.num_experts,
            num_groups=router.num_groups,
            experts_per_token=router.experts_per_token,
            renormalizes=router.renormalizes,
            has_admitted=router.block_capacity > 0,
        )
        found["grouped_matmul"] = grouped_matmul.choose(
            dtype=DTYPE,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.moe.intermediate_size,
        )
    for weight, (out, contraction) in columns.items():
        found[weight] = dense_matmul.choose(
            dtype=DTYPE, tokens=tokens, columns=out, contraction=contraction
        )
    return found


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", ["sdar-1.7b", "sdar-4b", "sdar-8b", "sdar-30b-a3b"])
def test_sdar_runs_kernels_only_at_every_block_size(name, block_size, rows, monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    for op, choice in choices_of(name, rows=rows, block_size=block_size).items():
        # Products of more tokens are XLA's own, unless a recorded tile beats them.
        if not (op.startswith("w_") and rows * block_size > MAX_TOKENS):
            assert choice.implementation == "mosaic_gpu", (op, choice.reasons)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", ["fast-dllm-v2-1.5b", "fast-dllm-v2-7b"])
def test_fast_dllm_v2_runs_kernels_only(name, rows, monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    for op, choice in choices_of(name, rows=rows, block_size=32).items():
        if not (op.startswith("w_") and rows * 32 > MAX_TOKENS):
            assert choice.implementation == "mosaic_gpu", (op, choice.reasons)
    # A step with the sub-block cache: parts of 8 tokens, each of which sees its whole block.
    of_parts = extend_attention.choose(
        dtype=DTYPE,
        head_dim=128,
        page_size=pool.choose_page_size(32, None),
        block_size=sizes.part_tokens(32),
        q_heads=28,
        kv_heads=4,
        visibility="full",
        tokens=rows * sizes.part_tokens(32),
        rows=rows,
    )
    assert of_parts.implementation == "mosaic_gpu", of_parts.reasons


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_nemotron_runs_kernels_only_in_both_forwards_and_at_both_sizes(rows, monkeypatch):
    """Denoised blocks and causal ones, of 32 positions or of the 8 that are enough for one token.

    Prompts are packed in tiles of 32, the op's own work.
    """
    devices.pretend(monkeypatch, devices.HOPPER)
    for op, choice in choices_of("nemotron-labs-diffusion-8b", rows=rows, block_size=32).items():
        if not (op.startswith("w_") and rows * 32 > MAX_TOKENS):
            assert choice.implementation == "mosaic_gpu", (op, choice.reasons)
    for size in (32, sizes.part_tokens(32)):
        for visibility in ("full", "causal"):
            attention = extend_attention.choose(
                dtype=DTYPE,
                head_dim=128,
                page_size=pool.choose_page_size(32, None),
                block_size=size,
                q_heads=32,
                kv_heads=8,
                visibility=visibility,
                tokens=rows * size,
                rows=rows,
            )
            assert attention.implementation == "mosaic_gpu", attention.reasons


def test_llada_moe_s_routing_is_xla_s_and_says_why(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    check_that_only_routing_is_slow("llada-moe-7b-a1b", "not renormalised")


def test_llada22_s_routing_by_blocks_is_xla_s_and_says_why(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    check_that_only_routing_is_slow("llada2.2-flash", "admitted experts")


def check_that_only_routing_is_slow(name, reason):
    found = choices_of(name, rows=4, block_size=32)
    slow = {op: one.reasons for op, one in found.items() if one.implementation != "mosaic_gpu"}
    assert list(slow) == ["top_k_routing"]
    assert reason in slow["top_k_routing"]


def test_what_diffusion_gemma_leaves_to_xla_says_why(monkeypatch):
    devices.pretend(monkeypatch, devices.HOPPER)
    hf = json.loads((CONFIGS / "diffusion-gemma-26b-a4b" / "config.json").read_text())
    config = registry.family(registry.architecture_of(hf)).parse_config(hf)
    slow = {}
    for i, layer in enumerate(config.layers):
        heads = layer.attention
        for visibility, block_size, tokens in (("full", 256, 1024), ("causal", 64, 256)):
            choice = extend_attention.choose(
                dtype=DTYPE,
                head_dim=heads.head_dim,
                page_size=pool.choose_page_size(256, None),
                block_size=block_size,
                q_heads=heads.num_query_heads,
                kv_heads=heads.num_kv_heads,
                visibility=visibility,
                tokens=tokens,
                rows=4,
                window=heads.window,
            )
            if choice.implementation != "mosaic_gpu":
                slow.setdefault(i, set()).add(choice.refusals["mosaic_gpu"])
        rotation = rotate_and_cache.choose(
            dtype=DTYPE,
            pool_dtype=DTYPE,
            head_dim=heads.head_dim,
            rotary_dim=heads.rope.rotary_dim,
        )
        assert rotation.implementation == "mosaic_gpu", rotation.reasons
    # The layers without a window: attention of heads of 512.
    reason = {"needs head_dim up to 256: with 512 a thread holds 256 sums"}
    assert slow == {i: reason for i in (5, 11, 17, 23, 29)}
    experts = grouped_matmul.choose(
        dtype=DTYPE, hidden_size=2816, intermediate_size=704, activation="gelu_tanh"
    )
    assert experts.implementation == "mosaic_gpu", experts.reasons
