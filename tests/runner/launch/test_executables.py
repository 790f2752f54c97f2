"""The options for XLA: on a GPU a launch is one CUDA graph, loops included."""

import jax
import pytest

from jdllm.device import facts
from jdllm.runner.launch import executables
from pallas_kernels import dispatch

CPU = facts.DeviceFacts(platform="cpu", device_kind="cpu")
GPU = facts.DeviceFacts(platform="gpu", device_kind="NVIDIA H200")


@pytest.mark.parametrize("flags", [None, "--xla_dump_to=/tmp/x"])
def test_loops_are_captured_on_a_gpu(monkeypatch, flags):
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert executables.compiler_options(CPU) == {}
    (captured,) = executables.compiler_options(GPU).values()
    assert {"WHILE", "CONDITIONAL", "FUSION", "CUSTOM_CALL"} <= set(captured.split(","))


def test_what_xla_flags_say_of_captured_graphs_holds(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert executables.compiler_options(GPU) == {}


def test_this_xla_knows_the_options():
    options = {executables.GRAPH_OPTION: executables.CAPTURED, executables.FP8_OPTION: "False"}
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)


def test_programs_with_products_of_8_bit_floats_do_not_try_triton(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    fast, wide = (
        {"fp8_matmul": [dispatch.Choice(implementation=name, refusals={})]}
        for name in ("xla_fp8", "xla")
    )
    assert executables.fp8_options(fast) == {executables.FP8_OPTION: "False"}
    assert executables.fp8_options(wide) == executables.fp8_options({}) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{executables.FP8_OPTION}=true")
    assert executables.fp8_options(fast) == {}
