"""Weights of text encoders that wait in the host's memory: what a traced program copies, and when.

On a CPU all memory is the host's, so that only the program says what a GPU would do.
"""

from __future__ import annotations

import jax
import numpy as np
from support import golden_pipelines, jaxprs
from support.offloaded_encoders import encode_bucket, offloaded, runner

from jdllm.models.images import host_weights


@golden_pipelines.of_each
def test_a_layer_is_copied_only_when_the_layer_before_the_last_one_has_ended(golden):
    """Of the traced program: what each copy waits for, by the weights that it was computed with.

    XLA drops what a barrier waits for if nobody goes on with the value as the barrier returns it.
    """
    pipeline, params = offloaded(golden).pipeline, offloaded(golden).params
    ids, lens = np.ones((1, golden.tokens), np.int32), np.full((1,), golden.tokens, np.int32)
    traced = jax.make_jaxpr(pipeline.encode)(params, ids, lens).jaxpr
    barriers = _barriers(traced, dict(zip(traced.invars, sorted(params), strict=False)))
    encoders = pipeline.layout.text_encoders
    num_layers = {name: len(pipeline.parts.module(name, params).layers) for name in encoders}
    seen = 0
    for copied, waited_for, goes_on in barriers:
        (layer,) = {_layer(path) for path in copied}
        before = {path for path in params if _is_before_last(_layer(path), layer, num_layers)}
        assert before <= waited_for
        assert goes_on
        seen += len(copied)
    in_layers = [path for path in params if _layer(path)[0] in encoders and "layers" in path]
    assert seen >= len(in_layers) > 0


def _layer(path):
    """Returns (component, number of the layer), or (component, None) of what is in no layer."""
    component, *rest = path.split(".")
    return component, int(rest[1]) if rest[0] == "layers" else None


def _is_before_last(one, layer, num_layers):
    """Returns whether a layer is the one before the last one when `layer` is copied.

    What stands behind the layers is copied at their end.
    """
    component, index = layer
    return one == (component, num_layers[component] - 1 if index is None else index - 2)


def _barriers(jaxpr, names):
    """Returns of each barrier (weights copied, weights its condition needed, condition is used)."""
    needed = {var: {name} for var, name in names.items()}
    used = {id(var) for one in jaxpr.eqns for var in one.invars} | set(map(id, jaxpr.outvars))
    found = []
    for one in jaxpr.eqns:
        sets = [needed.get(var, set()) if not hasattr(var, "val") else set() for var in one.invars]
        if one.primitive.name == "optimization_barrier":
            is_weight = [var.aval.memory_space == jax.memory.Space.Host for var in one.invars]
            condition = [k for k, is_host in enumerate(is_weight) if not is_host]
            found.append(
                (
                    set().union(*(sets[k] for k in range(len(sets)) if is_weight[k])),
                    set().union(*(sets[k] for k in condition)),
                    all(id(one.outvars[k]) in used for k in condition),
                )
            )
            needed |= zip(one.outvars, sets, strict=True)
        else:
            needed |= dict.fromkeys(one.outvars, set().union(*sets))
    return found


@golden_pipelines.of_each
def test_a_compiled_launch_copies_each_weight_of_the_host_and_computes_with_none(golden):
    """GPUs need it: there XLA refuses products of what is in the host's memory, on a CPU not."""
    made, params = runner(golden), offloaded(golden).params
    bucket = encode_bucket(golden)
    traced = made._executables.trace(bucket, made._params, made._memory).traced
    of_encoders = {name for name, array in params.items() if host_weights.is_on_host(array)}
    copies = 0
    for one in jaxprs.equations(traced.jaxpr.jaxpr):
        takes_host = any(_is_host(var) for var in one.invars)
        if one.primitive.name == "device_put":
            copies += takes_host and not any(map(_is_host, one.outvars))
        else:
            assert not takes_host or one.primitive.name in ("optimization_barrier", "jit", "pjit")
    assert copies == len(of_encoders) > 0
    assert not any(map(_is_host, traced.jaxpr.jaxpr.outvars))


def _is_host(var):
    return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
