"""The table of algorithms: it is consistent, and all that knows an option derives from it."""

import copy
import dataclasses
import math
import pickle

import jax
import numpy as np
import pytest
from support import docs_tables

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.decoding.block.interface import BlockParams
from jdllm.decoding.canvas.interface import CanvasParams
from jdllm.decoding.uniform.interface import UniformParams
from jdllm.options import config
from jdllm.options.sampling_params import DllmParams

KINDS = (lookup.BLOCK, lookup.CANVAS, lookup.UNIFORM)
DECLARED = [
    pytest.param(algorithm, option, id=f"{algorithm.name}-{option.name}")
    for algorithm in lookup.TABLE.values()
    for option in algorithm.options
]
every_option = pytest.mark.parametrize(("algorithm", "option"), DECLARED)
every_algorithm = pytest.mark.parametrize("name", lookup.TABLE)

# The arrays as packed words and compiled launches have had them since they exist.
LAYOUT = {
    lookup.BLOCK: [
        ("threshold", "float32", 0),
        ("edit_threshold", "float32", 0),
        ("max_post_edit_steps", "int32", 0),
        ("penalty_lambda", "float32", 0),
        ("remasking_strategy", "int32", 0),
        ("denoising_steps", "int32", 0),
        ("eb_threshold", "float32", 0),
        ("selection_policy", "int32", 0),
        ("max_denoising_steps", "int32", 0),
        ("seed_first", "bool", 0),
        ("small_block_size", "int32", 1),
        ("use_block_cache", "bool", 0),
        ("block_length", "int32", 1),
    ],
    lookup.CANVAS: [
        ("threshold", "float32", 0),
        ("block_add_threshold", "float32", 0),
        ("decoded_token_threshold", "float32", 0),
        ("early_stop", "bool", 0),
        ("cache_mode", "int32", 0),
        ("cache_delay_iter", "int32", 1),
        ("refresh_interval", "int32", 1),
        ("block_length", "int32", 1),
        ("steps", "int32", 0),
        ("remasking", "int32", 0),
        ("cfg_scale", "float32", 0),
        ("alg", "int32", 0),
        ("alg_temp", "float32", 0),
        ("eps", "float32", 0),
        ("factor", "float32", 0),
    ],
    lookup.UNIFORM: [
        ("max_denoising_steps", "int32", 0),
        ("entropy_bound", "float32", 0),
        ("t_max", "float32", 0),
        ("t_min", "float32", 0),
        ("confidence_threshold", "float32", 0),
        ("stability_threshold", "int32", 0),
    ],
}


def toy_algorithm():
    """Returns LowConfidence with one option more."""
    patience = lookup.Option(
        name="patience", type="integer", default=5, help="steps to wait", low=2, high=9, padding=3
    )
    plain = lookup.TABLE["LowConfidence"]
    return dataclasses.replace(plain, options=(*plain.options, patience))


@every_option
def test_an_option_says_what_it_may_hold_and_its_default_is_that(algorithm, option):
    assert option.help and "|" not in option.help
    assert (option.default is None) == bool(option.unset)
    assert bool(option.words) == (option.type == "word")
    if option.default is not None:
        lookup.checked(algorithm.name, option.name, option.default)
    if option.type in ("number", "integer"):
        assert -math.inf < option.low < option.high < math.inf
        outside = [option.low - 1, option.high + 1]
    else:
        outside = ["nonsense", 7]
    for value in outside:
        with pytest.raises(errors.RequestError) as raised:
            DllmParams(algorithm=algorithm.name, **{option.name: value})
        assert raised.value.param == f"dllm.{option.name}"


@every_algorithm
def test_an_algorithm_names_what_it_has(name):
    algorithm = lookup.TABLE[name]
    assert algorithm.name == name and algorithm.kind in KINDS and algorithm.writes
    assert len(algorithm.defaults) == len(algorithm.options)
    assert set(algorithm.alternatives) <= set(algorithm.defaults)
    mode = algorithm.option("cache_mode")
    assert set(algorithm.exact_modes) <= set(mode.words if mode else ())
    assert bool(algorithm.exact_modes) == (mode is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_one_name_share_an_array_and_no_attribute_of_another_meaning(kind):
    for algorithm in lookup.of_kind(kind).values():
        for option in algorithm.options:
            shared = lookup.arrays_of(kind)[option.name]
            same = ("type", "padding", "counts_positions")
            assert [getattr(option, each) for each in same] == [
                getattr(shared, each) for each in same
            ]
            assert not hasattr(type(DllmParams()), option.name), "an attribute hides it"


def test_options_of_one_name_have_one_type_for_all_kinds():
    types = {}
    for algorithm in lookup.TABLE.values():
        for option in algorithm.options:
            assert types.setdefault(option.name, option.type) == option.type
    assert tuple(types) == lookup.option_names()


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_the_arrays_is_fixed(kind):
    arrays = lookup.padding(kind, 3)
    described = [(name, str(array.dtype), array[0]) for name, array in arrays.items()]
    assert described == LAYOUT[kind]
    assert all(array.shape == (3,) and len(set(array)) == 1 for array in arrays.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_sees_the_arrays_by_name_and_in_their_order(kind):
    arrays = lookup.padding(kind, 2)
    if kind == lookup.BLOCK:
        params, more = BlockParams(**arrays), []
    elif kind == lookup.UNIFORM:
        params, more = UniformParams(**arrays), []
    else:
        more = [np.zeros(2, np.float32), np.zeros((2, 2), np.uint32)]
        params = CanvasParams(**arrays, temperature=more[0], seed=more[1])
    leaves = jax.tree.leaves(params)
    assert all(a is b for a, b in zip(leaves, [*arrays.values(), *more], strict=True))
    assert all(getattr(params, name) is array for name, array in arrays.items())


@every_algorithm
def test_what_a_row_is_filled_with_can_be_read_back(name):
    algorithm = lookup.TABLE[name]
    arrays = lookup.padding(algorithm.kind, 3)
    dllm = DllmParams(algorithm=name).resolve(DllmParams())
    lookup.fill(arrays, 1, dllm.algorithm, dllm.options, row_length=20)
    for option, array in arrays.items():
        padding = lookup.padding(algorithm.kind, 1)[option][0]
        assert array[0] == array[2] == padding
        declared, value = algorithm.option(option), getattr(dllm, option)
        if value is None:
            assert array[1] == padding
        elif declared.type == "word":
            assert lookup.word(name, option, value) == array[1]
            assert declared.words[array[1]] == value
        elif declared.counts_positions:
            assert array[1] == min(value, 20)
        else:
            assert array[1] == array.dtype.type(value)


def test_a_new_option_is_declared_in_the_table_alone(monkeypatch):
    """Checks, defaults, configuration, arrays and documents have it, none of them edited."""
    monkeypatch.setattr(lookup, "TABLE", lookup.TABLE | {"LowConfidence": toy_algorithm()})
    resolved = DllmParams.from_mapping({"patience": 7}).resolve(
        DllmParams(algorithm="LowConfidence")
    )
    assert (resolved.patience, resolved.threshold) == (7, 0.95)
    assert DllmParams(algorithm="LowConfidence").resolve(DllmParams()).patience == 5
    for value, message in ((1, "between 2 and 9"), (2.5, "an integer"), ("x", "an integer")):
        with pytest.raises(errors.RequestError, match=message) as raised:
            DllmParams(patience=value)
        assert raised.value.param == "dllm.patience"
    with pytest.raises(errors.RequestError, match="did you mean 'patience'"):
        DllmParams(patienc=3)
    with pytest.raises(errors.RequestError, match="JointThreshold has no option 'patience'"):
        DllmParams(patience=3).resolve(DllmParams(algorithm="JointThreshold"))
    options = {"patience": 4}
    assert config.EngineConfig(dllm_algorithm_config=options).algorithm_options() == options
    arrays = lookup.padding(lookup.BLOCK, 2)
    lookup.fill(arrays, 0, resolved.algorithm, resolved.options, row_length=32)
    assert arrays["patience"].tolist() == [7, 3] and arrays["patience"].dtype == np.int32
    assert "patience" not in lookup.padding(lookup.CANVAS, 2)
    assert "`patience` 5" in docs_tables.algorithms(lookup.BLOCK)
    assert "| 2 to 9 | steps to wait |" in docs_tables.algorithm_options(lookup.BLOCK)


def test_without_an_algorithm_a_value_of_any_algorithm_passes():
    for word in ("exact", "dual"):
        assert DllmParams(cache_mode=word).cache_mode == word
    assert DllmParams(threshold=1.5).threshold == 1.5
    with pytest.raises(errors.RequestError, match="did you mean 'window'"):
        DllmParams(cache_mode="windw")


@every_algorithm
def test_steps_forward_the_whole_canvas_unless_a_cache_mode_says_less(name):
    algorithm = lookup.TABLE[name]
    mode = algorithm.option("cache_mode")
    for word in mode.words if mode else (None,):
        dllm = DllmParams(algorithm=name, cache_mode=word)
        is_exact = word in (None, "exact", "none") and algorithm.kind == lookup.CANVAS
        assert dllm.forwards_whole_canvas == is_exact


def test_params_are_values():
    dllm = DllmParams(algorithm="FastDLLM", threshold=0.7, cache_mode="dual")
    other = DllmParams(cache_mode="dual", algorithm="FastDLLM", threshold=0.7, steps=None)
    assert dllm == other and hash(dllm) == hash(other) and dllm != DllmParams(threshold=0.7)
    for copied in (copy.deepcopy(dllm), pickle.loads(pickle.dumps(dllm))):
        assert copied == dllm and copied.cache_mode == "dual"
    with pytest.raises(dataclasses.FrozenInstanceError):
        dllm.algorithm = "LLaDA"
    assert dllm.options == {"threshold": 0.7, "cache_mode": "dual"} and dllm.eps is None
