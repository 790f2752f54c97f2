"""Cuts of parameters, configs of one rank, and the sizes that are refused before weights are read.

What needs several devices is in `parallel/`, and runs in a process of its own.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdllm
import pallas_kernels
from jdllm import errors
from jdllm.device import sharding
from jdllm.models import loading, registry, split

TESTS = pathlib.Path(__file__).parent
GOLDENS = TESTS / "data" / "goldens"
HEADS = sharding.Heads(query=8, kv=4, dim=2)
FAMILIES = ("llada2", "llada", "dream", "diffusion_gemma")
SHAPES = [
    ("attention.w_qkv", (32, 3)),
    ("attention.b_qkv", (32,)),
    ("attention.w_qk", (24, 3)),
    ("attention.w_out", (3, 16)),
    ("out_adapter.down", (2, 16)),
    ("mlp.w_gate_up", (48, 3)),
    ("mlp.w_down", (3, 24)),
    ("shared_experts.w_gate_up", (2 * 512, 1)),
    ("shared_experts.w_gate_up", (2 * 192, 1)),  # 192 / 2 is no multiple of 64
    ("shared_experts.w_gate_up", (2 * 24, 1)),  # not interleaved
    ("shared_experts.w_down", (3, 24)),
    ("experts.w_gate_up", (8, 2 * 192, 1)),
    ("experts.w_down", (8, 3, 24)),
    ("lm_head", (40, 3)),
    ("feed_forward.w_gate_up", (48, 3)),
    ("feed_forward.w_down", (3, 24)),
    ("mlp_in.weight", (24, 3)),
    ("mlp_in.bias", (24,)),
    ("mlp_out.weight", (3, 24)),
]
# Of transformers that make images, whose heads have keys of their own.
EVERY_HEAD = sharding.Heads(query=8, kv=8, dim=2)
SHAPES_OF_HEADS = [
    ("qkv.weight", (48, 3)),
    ("qkv.bias", (48,)),
    ("qkv_mlp.weight", (48 + 64, 3)),
    ("qkv_mlp.bias", (48 + 64,)),
    ("out.weight", (3, 16)),
    ("out.weight", (3, 16 + 64)),
]


def golden(family):
    return loading.read_config(GOLDENS / family)


def rows_of_gate_and_up(rows):
    """Returns the row numbers of gate, and of up, of an array that interleaves groups of 64."""
    group = 64 if rows // 2 % 64 == 0 else rows // 2
    numbers = np.arange(rows).reshape(-1, 2, group)
    return numbers[:, 0].ravel(), numbers[:, 1].ravel()


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("whole_experts", [True, False])
@pytest.mark.parametrize(
    ("leaf", "shape", "heads"),
    [(*one, HEADS) for one in SHAPES] + [(*one, EVERY_HEAD) for one in SHAPES_OF_HEADS],
)
def test_parts_joined_again_are_the_parameter(leaf, shape, heads, tp, whole_experts):
    shards = sharding.Shards(tp=tp, ep=tp if whole_experts else 1)
    how = sharding.cut_of(leaf, shape, heads, shards)
    whole = np.arange(np.prod(shape)).reshape(shape)
    joined, times = np.full(shape, -1), np.zeros(shape, int)
    for rank in range(tp):
        part = sharding.cut(whole, how, rank, tp)
        assert part.shape == sharding.local_shape(shape, how, tp)
        begin = 0
        for one in how.slices(rank, tp):
            place = (slice(None),) * how.axis + (one,)
            size = joined[place].shape[how.axis]
            from_part = (slice(None),) * how.axis + (slice(begin, begin + size),)
            joined[place] = part[from_part]
            times[place] += 1
            begin += size
        assert begin == part.shape[how.axis]
    np.testing.assert_array_equal(joined, whole)
    # Only K and V of heads that ranks share are on several of them.
    copies = max(1, tp // heads.kv) if "qk" in leaf else 1
    assert set(np.unique(times)) <= {1, copies}


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("width", [512, 192, 24])
def test_a_rank_has_the_same_columns_of_gate_and_up(width, tp):
    """The part is in the layout that `grouped_matmul` expects of an array of its width."""
    shape = (2 * width, 1)
    shards = sharding.Shards(tp=tp)
    how = sharding.cut_of("mlp.shared_experts.w_gate_up", shape, HEADS, shards)
    gate, up = rows_of_gate_and_up(2 * width)
    local = width // tp
    for rank in range(tp):
        part = sharding.cut(np.arange(2 * width)[:, None], how, rank, tp)[:, 0]
        my_gate, my_up = rows_of_gate_and_up(2 * local)
        mine = slice(rank * local, (rank + 1) * local)
        np.testing.assert_array_equal(part[my_gate], gate[mine])
        np.testing.assert_array_equal(part[my_up], up[mine])


def test_each_rank_has_the_kv_head_that_its_query_heads_read():
    shards = sharding.Shards(tp=8)
    how = sharding.cut_of("attention.w_qkv", (32, 1), HEADS, shards)
    for rank in range(8):
        part = sharding.cut(np.arange(32)[:, None], how, rank, 8)[:, 0]
        kv = rank // 2  # query heads 2n and 2n + 1 read kv head n
        q, k, v = 2 * rank, 16 + 2 * kv, 24 + 2 * kv
        np.testing.assert_array_equal(part, [q, q + 1, k, k + 1, v, v + 1])


def test_a_rank_has_the_hidden_numbers_beside_its_heads():
    """FLUX.1's single blocks have attention and feed-forward in one product, and in another."""
    shards = sharding.Shards(tp=4)
    rows = sharding.cut_of("qkv_mlp.weight", (48 + 64, 1), EVERY_HEAD, shards)
    columns = sharding.cut_of("out.weight", (1, 16 + 64), EVERY_HEAD, shards)
    for rank in range(4):
        heads, hidden = np.arange(4 * rank, 4 * rank + 4), np.arange(16 * rank, 16 * rank + 16)
        part = sharding.cut(np.arange(48 + 64)[:, None], rows, rank, 4)[:, 0]
        expected = [*heads, *(16 + heads), *(32 + heads), *(48 + hidden)]
        np.testing.assert_array_equal(part, expected)
        part = sharding.cut(np.arange(16 + 64)[None], columns, rank, 4)[0]
        np.testing.assert_array_equal(part, [*heads, *(16 + hidden)])


def test_experts_are_spread_like_cards():
    how = sharding.cut_of("experts.w_down", (8, 1, 1), HEADS, sharding.Shards(tp=4, ep=4))
    parts = [sharding.cut(np.arange(8)[:, None, None], how, rank, 4).ravel() for rank in range(4)]
    np.testing.assert_array_equal(parts, [[0, 4], [1, 5], [2, 6], [3, 7]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ep", [1, None])
def test_the_module_of_a_rank_has_the_shapes_of_the_parts(family, ep):
    config = golden(family)
    of = registry.family(config.spec.architecture)
    whole = of.shapes(config)
    for tp in (2, 4):
        shards = split.shards_of(config, tp, ep)
        found = of.shapes(split.local_config(config, shards))
        cuts = split.cuts(config, whole, shards)
        assert found.keys() == cuts.keys()
        for path, how in cuts.items():
            shape = whole.get(path, whole[split.EMBEDDING]).shape  # a tied head is its own array
            expected = shape if how is None else sharding.local_shape(shape, how, tp)
            assert found[path].shape == expected, path


def test_one_rank_is_the_model_itself():
    config = golden("llada2")
    shards = split.shards_of(config, 1, None)
    assert shards == sharding.ONE_RANK
    assert split.local_config(config, shards) is config
    assert sharding.make_mesh(1, jax.local_devices()) is None


def test_a_matrix_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="no rule for layers.0.odd.w_new"):
        sharding.cut_of("layers.0.odd.w_new", (4, 4), HEADS, sharding.Shards(tp=2))


def changed(**sizes):
    config = golden("llada2")
    layers = tuple(
        dataclasses.replace(
            layer,
            attention=dataclasses.replace(layer.attention, **sizes.get("attention", {})),
            feed_forward=dataclasses.replace(
                layer.feed_forward,
                **sizes.get("experts" if hasattr(layer.feed_forward, "router") else "mlp", {}),
            ),
        )
        for layer in config.layers
    )
    spec = dataclasses.replace(config.spec, **sizes.get("spec", {}))
    return dataclasses.replace(config, layers=layers, spec=spec)


@pytest.mark.parametrize(
    ("config", "tp", "ep", "message"),
    [
        (
            changed(),
            8,
            None,
            "tp_size=8: 4 query heads cannot be divided by 8; use tp_size 1, 2, 4",
        ),
        (
            changed(attention={"num_query_heads": 24, "num_kv_heads": 3}),
            2,
            None,
            "3 kv heads neither divide 2 nor can be divided by it; use tp_size 1",
        ),
        (changed(spec={"vocab_size": 321}), 2, None, "vocabulary of 321 tokens cannot"),
        (changed(mlp={"width": 98}), 4, None, "feed-forward width 98 .* 4; use tp_size 1, 2$"),
        (changed(experts={"width": 18}), 4, 1, "the experts' width 18 cannot be divided by 4"),
        (changed(experts={"shared_width": 18}), 4, None, "shared experts' width 18"),
        (changed(), 4, 2, "ep_size=2 must be 1 or tp_size"),
        (golden("llada"), 2, 2, "ep_size=2, but the model has no experts; use tp_size 1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_would_work(config, tp, ep, message):
    with pytest.raises(errors.ConfigError, match=message):
        split.shards_of(config, tp, ep)


def test_experts_that_cannot_be_spread_can_be_sliced():
    router = dataclasses.replace(changed().layers[-1].feed_forward.router, num_experts=30)
    config = changed(experts={"router": router})
    with pytest.raises(
        errors.ConfigError, match="30 experts .* use tp_size 1, 2, 4 with ep_size=1$"
    ):
        split.shards_of(config, 4, None)
    assert split.shards_of(config, 4, 1) == sharding.Shards(tp=4, ep=1)


def test_too_few_devices_are_refused_before_weights_are_read(tmp_path):
    config = (GOLDENS / "llada2" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)  # and no weights
    missing = len(jax.local_devices()) + 1
    with pytest.raises(errors.ConfigError, match=f"tp_size={missing} needs {missing} .*JAX sees"):
        jdllm.Engine(model_path=str(tmp_path), skip_tokenizer_init=True, tp_size=missing)


def test_sums_of_more_than_two_ranks_are_made_in_rank_order():
    """Not by the library, whose order may differ from rank to rank."""

    def program(tp):
        mesh = jax.sharding.AbstractMesh((tp,), (sharding.AXIS,))
        run = jax.shard_map(
            lambda x: pallas_kernels.all_reduce((x,), axis_name=sharding.AXIS),
            mesh=mesh,
            in_specs=sharding.REPLICATED,
            out_specs=sharding.REPLICATED,
            check_vma=False,
        )
        return str(jax.make_jaxpr(run)(jnp.zeros((1, 4), jnp.bfloat16)))

    assert "psum" in program(2)
    assert "all_gather" in program(4)
    assert "psum" not in program(4)


@pytest.mark.parametrize(
    "marks",
    [
        "not campaign and not long",
        pytest.param("campaign and not long", marks=pytest.mark.campaign),
        pytest.param("long", marks=pytest.mark.long),
    ],
)
def test_on_several_devices(marks):
    """In a process of its own: the number of devices is fixed when jax starts."""
    flag = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *map(str, sorted((TESTS / "parallel").glob("*.py"))),
            "-m",
            marks,
            "-x",
        ]
        + ["-p", "no:cacheprovider"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
