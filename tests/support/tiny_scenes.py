"""A tiny run of the recipe `scenes`, for its tests."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np

from jdllm.train.scenes import networks

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "configs" / "nano-image"
RECIPE = ROOT / "configs" / "train" / "nano-image.yaml"
CHANGES = {
    "text_encoder": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "transformer": {
        "dim": 24,
        "n_heads": 2,
        "n_kv_heads": 2,
        "axes_dims": [4, 4, 4],
        "in_channels": 4,
        "cap_feat_dim": 16,
        "n_layers": 1,
    },
    "vae": {"block_out_channels": [4, 8, 8], "norm_num_groups": 4, "latent_channels": 4},
}
SETTINGS = {
    "sizes": ["64x64"],
    "num_steps": 40,
    "vae_steps": 20,
    "max_minutes": None,
    "vae_minutes": None,
    "vae_batch_size": 4,
    "vae_learning_rate": 3e-3,
    "batch_size": 8,
    "compute_dtype": "float32",
    "warmup_steps": 3,
    "log_every": 5,
    "checkpoint_every": 100,
    "eval_every": 100,
    "eval_problems": 4,
    "eval_steps": [1, 2],
    "pool_scenes": 32,
    "chunk_scenes": 16,
    "data_workers": 0,
}


def write_model(folder):
    """Writes the shipped configs with tiny sizes; returns the folder."""
    for path in SHIPPED.rglob("*.json"):
        values = json.loads(path.read_text())
        values |= CHANGES.get(path.parent.name, {})
        place = folder / path.relative_to(SHIPPED)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(values))
    return folder


def arguments(model_path, output_dir, **changes):
    """Returns the command line of a tiny run."""
    settings = SETTINGS | {"model_path": str(model_path)} | changes
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return ["--config", str(RECIPE), "--output-dir", str(output_dir), "--set", *words]


def build(folder):
    """Returns the networks of a tiny pipeline, written to `folder`, with float32."""
    return networks.build(write_model(folder / "model"), folder / "pipeline", "float32")


def curved_params(built):
    """Returns weights whose flow is curved; those of `init_params` have no velocity."""
    first, draw = networks.init_params(built, 0), np.random.default_rng(1)
    drawn = {path: a + 0.1 * draw.standard_normal(a.shape) for path, a in first.items()}
    own = {path: jnp.asarray(a, jnp.float32) for path, a in drawn.items()}
    return own | {networks.SHIFT: jnp.float32(0.3), networks.FACTOR: jnp.float32(1.7)}
