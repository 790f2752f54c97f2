"""Compiles launches for an H200 without one; for `count_kernels.py`.

It needs jax with its CUDA plugin (`pip install "jax[cuda13]"`), but no GPU. Without one XLA picks
GEMMs and convolutions without timing them; everything else is what a GPU gets.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any
from unittest import mock

import host_memory
import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.experimental import topologies

import pallas_kernels
from jdllm.device import facts
from jdllm.runner.launch import executables
from jdllm.runner.launch.words import packed_launch
from pallas_kernels import device

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""
CUDNN_VERSION = 91200  # that of `dnn_version_info` above, as jax asks the library for it
GPU = facts.DeviceFacts(platform="gpu", device_kind="NVIDIA H200")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch as a function, and the shapes of its arguments: weights, memory, inputs.

    The weights `on_host` are in the host's memory.
    """

    name: str
    step: Any
    arguments: tuple[Any, ...]
    on_host: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The optimised program of a launch, and the sequence of thunks that XLA runs.

    `scratch_bytes` are those of the device besides arguments and results.
    """

    program: str
    thunks: str
    scratch_bytes: int


def compiled(launch: Launch, more_options: Mapping[str, str]) -> Compiled:
    """Returns a launch compiled for an H200, with a server's options for XLA and with more."""
    topology = topologies.get_topology_desc(
        topology_name="h200", platform="cuda", target_config=H200, topology="1x1x1"
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    arguments: Any = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding),
        launch.arguments,
    )
    on_host = {
        name: host_memory.shape(arguments[0][name], topology.devices[0]) for name in launch.on_host
    }
    if on_host:
        arguments = ({**arguments[0], **on_host}, *arguments[1:])
    hopper = device.Device(
        platform="gpu",
        kind="NVIDIA H200",
        compute_capability=(9, 0),
        jax_version=jax.__version__,
    )
    with (
        mock.patch.object(device, "local_device", lambda: hopper),
        mock.patch.object(cudnn_attention, "check_cudnn_version", lambda: CUDNN_VERSION),
        pallas_kernels.record_choices() as choices,
    ):
        packed = packed_launch(launch.step, arguments)
        words = jax.ShapeDtypeStruct(packed.words.shape, packed.words.dtype, sharding=sharding)
        lowered = packed.launch.lower(*arguments[:2], words)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {
            **executables.compiler_options(GPU),
            **executables.fp8_options(choices),
            **more_options,
            "xla_dump_to": folder,
        }
        done = lowered.compile(compiler_options=options)
        (thunks,) = pathlib.Path(folder).glob("*jit_launch.thunk_sequence_after_thunk_passes.txt")
        return Compiled(
            program=done.as_text(),
            thunks=thunks.read_text(),
            scratch_bytes=done.memory_analysis().temp_size_in_bytes,
        )
