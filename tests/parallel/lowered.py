"""What the steps of a split model become on GPUs, lowered for CUDA on virtual CPU devices.

`test_sharding.py` runs this file in a process with eight of them.
"""

import json
import re

import jax
import pytest
from support import canvas_engine, devices, gemma_engine
from support.golden_configs import GOLDENS, variant
from support.tiny_engine import make_engine

from jdllm.device import sharding
from jdllm.runner.launch import over_mesh, peer_buffers
from pallas_kernels.hopper import compat

TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 64,
    "per_layer_config": None,
}
TEXT = json.loads((GOLDENS / "diffusion_gemma" / "config.json").read_text())["text_config"]


def make(family, options):
    match family:
        case "llada2":
            return make_engine(**options)
        case "nemotron_diffusion":
            options |= {"dllm_algorithm": "LinearSpec", "dllm_algorithm_config": None}
            return make_engine(**options)
        case "dream" | "llada":
            return canvas_engine.make(family, whole_tokens=(), **options)
        case _:
            return gemma_engine.make(options.pop("model_path"), max_total_tokens=256, **options)


@pytest.mark.skipif(not compat.supported(), reason=f"needs jax >= {compat.MIN_JAX_VERSION}")
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("llada2", 4),
        ("dream", 2),
        ("llada", 2),
        ("nemotron_diffusion", 2),
        ("diffusion_gemma", 2),
        pytest.param("llada2", 2, marks=pytest.mark.campaign),
        pytest.param("dream", 4, marks=pytest.mark.campaign),
    ],
)
def test_loops_of_gpus_hold_kernels_and_no_collective(family, tp, tmp_path, monkeypatch):
    """Lowered for CUDA, with buffers that stand for those of GPUs: one meeting before the loop."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    if family == "llada2":
        sizes |= {"head_dim": 64, "rotary_dim": 32}
    if family == "nemotron_diffusion":
        sizes |= {"head_dim": 64}
    if family == "llada":
        sizes = {"d_model": 512, "n_heads": 8, "n_kv_heads": 8}
    if family == "diffusion_gemma":
        sizes = {"text_config": TEXT | sizes | TWO_LAYERS}
    folder = variant(tmp_path / family, family, **sizes)
    options = {
        "page_size": 64,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "tp_size": tp,
        "model_path": str(folder),
    }
    with make(family, options) as engine:
        runner = engine._built.runner
        buffers = peer_buffers.allocate(
            sharding.make_mesh(tp, jax.local_devices()), row_bytes=1024, words=8 * 320
        )
        params = {**runner._params, over_mesh.PEERS: buffers.peers}
        devices.pretend(monkeypatch, devices.HOPPER)
        for bucket in runner.compiled:
            found = runner._executables.trace(bucket, params, runner._memory)
            text = found.traced.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("stablehlo.all_reduce") == 1, bucket
            assert "stablehlo.all_gather" not in text
            assert "stablehlo.partition_id" not in text
            # XLA crashes on arrays without elements there (`over_mesh.on_every_rank`).
            (handed_over,) = (line for line in text.splitlines() if "manual_computation" in line)
            assert re.search(r"tensor<\d", handed_over)
            assert not re.search(r"tensor<(\d+x)*0x", handed_over), bucket
            (choice,) = {one.implementation for one in found.choices["all_reduce"]}
            assert choice == "mosaic_gpu"
