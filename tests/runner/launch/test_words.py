"""Packed transfers: packing and unpacking keep every bit, in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.runner.launch import words as packing
from jdllm.runner.launch.words import Layout


def tree_of(seed):
    rng = np.random.default_rng(seed)
    floats = rng.normal(size=(3, 2)).astype(np.float32)
    floats[0] = [np.nan, -0.0]
    return {
        "ids": rng.integers(-(2**31), 2**31, (4,)).astype(np.int32),
        "flags": rng.random((2, 3)) < 0.5,
        "nested": (floats, rng.integers(0, 2**32, (5, 2), dtype=np.uint32)),
        "scalar": np.int32(-7),
        "none": np.zeros((0, 3), np.float32),
    }


def same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert np.asarray(one).dtype == np.asarray(two).dtype
        assert np.asarray(one).shape == np.asarray(two).shape
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.mark.parametrize("alignment", [1, 4, 64])
@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_bit_on_the_host_and_on_the_device(seed, alignment):
    tree = tree_of(seed)
    layout = Layout.of(tree, alignment=alignment)
    words = layout.pack(tree, layout.num_words + 3)
    assert words.shape == (layout.num_words + 3,) and words.dtype == packing.WORD
    assert not words[-3:].any()
    same_bits(layout.unpack(words), tree)
    same_bits(jax.jit(layout.unpack)(words), tree)
    if alignment == 1:
        np.testing.assert_array_equal(jax.jit(packing.pack_traced)(tree), words[:-3])


def test_leaves_begin_at_whole_alignments():
    tree = {"a": np.full(5, 1, np.int32), "b": np.full(8, 2, np.int32), "c": np.int32(3)}
    layout = Layout.of(tree, alignment=8)
    expected = [1] * 5 + [0] * 3 + [2] * 8 + [3]
    assert layout.pack(tree, layout.num_words).tolist() == expected


def test_a_launch_writes_its_results_into_the_buffer_of_its_inputs():
    """Compiled: the buffer is donated, and its last word is the one that was given."""

    def step(params, memory, inputs):
        memory = memory + params * inputs["scale"]
        return memory, {"sum": jnp.sum(memory), "is_large": memory > 1}

    arguments = (jnp.float32(2), jnp.arange(4, dtype=jnp.float32), {"scale": jnp.float32(0.25)})
    expected = step(*arguments)
    packed = packing.packed_launch(step, arguments)
    words = packed.pack(jax.tree.map(np.asarray, arguments[2]))
    words[-1] = 7
    words = jnp.asarray(words)
    compiled = packed.launch.lower(*arguments[:2], packed.words).compile()
    given = words.unsafe_buffer_pointer()
    memory, results = compiled(*arguments[:2], words)
    assert results.unsafe_buffer_pointer() == given and words.is_deleted()
    np.testing.assert_array_equal(memory, expected[0])
    same_bits(packed.outputs.unpack(np.asarray(results)), jax.tree.map(np.asarray, expected[1]))
    assert results.shape == (packed.num_words,) and results[-1] == 7
    assert packed.num_words > max(packed.inputs.num_words, packed.outputs.num_words)


def test_leaves_of_another_shape_are_refused():
    layout = Layout.of({"a": np.zeros(4, np.int32)})
    for wrong in (np.zeros(1, np.int32), np.zeros((2, 2), np.int32), np.int32(0)):
        with pytest.raises(ValueError, match=r"the layout has \(4,\)"):
            layout.pack({"a": wrong}, 4)


def test_leaves_that_are_no_words_are_refused():
    with pytest.raises(ValueError, match="int8"):
        Layout.of({"a": jnp.zeros(3, jnp.int8)})
