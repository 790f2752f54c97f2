"""Folders of the tiny Nemotron with a random adapter beside its weights, as releases have one."""

import json
import pathlib
import shutil

import numpy as np
import safetensors.numpy

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "nemotron_diffusion"
LAYERS, HIDDEN, INPUTS = 3, 64, 128  # the output projection is [64, 4 heads of 32]
PUBLISHED = {  # the keys of all releases, whose rank is 128 and whose alpha is 512
    "peft_type": "LORA", "target_modules": ["o_proj"], "r": 8, "lora_alpha": 32,
    "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
    "layers_pattern": None, "bias": "none", "lora_bias": False, "use_dora": False,
    "fan_in_fan_out": False, "modules_to_save": None, "exclude_modules": None,
    "layer_replication": None, "init_lora_weights": True, "loftq_config": {}, "eva_config": None,
    "megatron_config": None, "megatron_core": "megatron.core", "lora_dropout": 0.0,
    "task_type": None, "inference_mode": True, "revision": None,
    "base_model_name_or_path": "nvidia/Nemotron-Labs-Diffusion-3B",
    "auto_mapping": {"base_model_class": "NemotronLabsDiffusionModel"},
}  # fmt: skip


def module(layer):
    return f"encoder.layers.{layer}.self_attn.o_proj"


def tensors(rank=8, layers=range(LAYERS), seed=0, size=0.05):
    """Returns random A and B; `rank` may be a function of the layer."""
    rng, found = np.random.default_rng(seed), {}
    for i in layers:
        r = rank(i) if callable(rank) else rank
        name = f"base_model.model.{module(i)}"
        found[f"{name}.lora_A.weight"] = rng.normal(0, size, (r, INPUTS)).astype(np.float32)
        found[f"{name}.lora_B.weight"] = rng.normal(0, size, (HIDDEN, r)).astype(np.float32)
    return found


def write(folder, config=None, stored=None):
    """Returns a model's folder with an adapter; `config` changes keys of the published one."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.npy"))
    adapter = folder / "linear_spec_lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(PUBLISHED | (config or {})))
    stored = tensors() if stored is None else stored
    safetensors.numpy.save_file(stored, adapter / "adapter_model.safetensors")
    return folder
