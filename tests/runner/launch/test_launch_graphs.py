"""`scripts/launch_graphs.py` tells what of a launch the host starts, from what XLA dumps."""

import importlib.util
import pathlib
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "scripts" / "launch_graphs.py"
# Dumps of jax 0.11.2, shortened; a number is that of a thunk, those of graphs are 000.
ONE_GRAPH = """
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source | next=002 (1)] loop_convert_fusion grid: [512, 1, 1]
    002: kWhile [prev=001 (1) | sink]
    condition:
        003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
"""
LOOPS_OUTSIDE = """
001: kConvolution [source | next=000 (1)] kConvolution
000: kCommandBuffer [prev=001 (1) | next=038 (1)]
    002: kCustomKernel [source | sink] loop_convert_fusion grid: [512, 1, 1]
038: kWhile [prev=000 (1) | next=000 (1)]
condition:
    039: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=050 (1)]
        040: kAsyncStart [source | next=044 (2)] stream=computation_stream[0], async_id=40
            042: kDynamicSliceFusion [source | sink] params=1, results=1
                041: kCopy [source | sink] kCopy
        043: kAsyncDone [source | sink] async_id=40
    050: kWhile [prev=000 (1) | sink]
    condition:
        051: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        052: kConvolution [source | sink] kConvolution
000: kCommandBuffer [prev=038 (1) | sink]
    060: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
"""


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("launch_graphs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "launch_graphs", module)
    spec.loader.exec_module(module)
    return module


def test_a_loop_inside_a_graph_is_part_of_it(script):
    assert script.describe(script.parse(ONE_GRAPH)) == ["one CUDA graph: yes"]


def test_a_graph_that_is_updated_at_every_use_is_told(script):
    thunks = script.parse(ONE_GRAPH + "    005: kDynamicSliceFusion [source | sink] params=1\n")
    assert script.describe(thunks) == ["one CUDA graph: yes; copies of moving slices: 1"]


def test_a_kernel_beside_the_graph_is_started_by_the_host(script):
    thunks = script.parse(ONE_GRAPH + "005: kCustomKernel [source | sink] wrapped_transpose\n")
    assert script.describe(thunks) == [
        "one CUDA graph: no, the host starts 1 CommandBuffer, 1 CustomKernel"
    ]


def test_loops_outside_are_told_with_their_rounds_and_moving_copies(script):
    assert script.describe(script.parse(LOOPS_OUTSIDE)) == [
        "one CUDA graph: no, the host starts 2 CommandBuffer, 1 Convolution, 1 While",
        "    in each round of a loop 1 CustomKernel, 1 CommandBuffer, 1 While; "
        "copies of moving slices: 1",
        "        in each round of a loop 1 CustomKernel, 1 Convolution",
    ]
