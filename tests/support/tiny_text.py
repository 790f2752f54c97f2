"""A tiny run of the recipe `text`, for its tests."""

import json
import shutil

from jdllm.checkpoint import source

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
SETTINGS = {
    "num_steps": 30,
    "decay_share": 0.5,
    "warmup_steps": 3,
    "learning_rate": 3e-3,
    "batch_size": 4,
    "log_every": 5,
    "checkpoint_every": 10,
    "eval_every": 1000,
    "eval_problems": 2,
    "data_threads": 1,
}


def write_model(folder):
    """Writes what training reads of jdllm-nano, with tiny sizes; returns the folder."""
    nano = source.bundled_model("jdllm-nano")
    for file in nano.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    hf = json.loads((nano / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, **SIZES}))
    return folder


def arguments(model_path, output_dir, **changes):
    """Returns the command line of a tiny run, whose config lies beside its output folder."""
    file = output_dir.with_suffix(".yaml")
    # JSON is YAML.
    file.write_text(json.dumps(SETTINGS | {"model_path": str(model_path)} | changes))
    return ["--config", str(file), "--output-dir", str(output_dir)]
