"""A model split over virtual devices: how tests load it, and what must hold on every rank."""

import jax
import numpy as np
from support.shards import assert_same_bits, shards_by_device

from jdllm.device import sharding
from jdllm.models import loading, split


def mesh_of(tp):
    return sharding.make_mesh(tp, jax.local_devices())


def load(folder, tp=1, ep=None, **options):
    shards = split.shards_of(loading.read_config(folder), tp, ep)
    options = {"dtype": "float32", "show_progress": False} | options
    return loading.load(folder, shards=shards, mesh=mesh_of(tp), **options), shards


def assert_parts_of(split_model, whole, shards):
    cuts = split.cuts(whole.config, whole.params, shards)
    assert cuts.keys() == split_model.params.keys()
    for path, how in cuts.items():
        source = whole.params.get(path, whole.params["word_embeddings"])
        held = shards_by_device(split_model.params[path])
        assert len(held) == shards.tp
        for rank, device_id in enumerate(sorted(held)):
            expected = np.asarray(source)
            if how is not None:
                expected = sharding.cut(expected, how, rank, shards.tp)[None]
            np.testing.assert_array_equal(held[device_id], expected, err_msg=path)


def answers(results):
    return [(one["output_ids"], one["meta_info"]["nfe"]) for one in results]


def assert_state_is_replicated(engine, tp):
    """The states of rows have the same bits everywhere, and each pool lies in parts."""
    memory = engine._built.core.runner._memory
    for pool in memory["pools"]:
        assert pool.sharding.spec == sharding.SPLIT
        assert len(pool.addressable_shards) == tp
    assert_same_bits({name: part for name, part in memory.items() if name != "pools"})
