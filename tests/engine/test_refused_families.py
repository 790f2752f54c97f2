"""Families whose logits we have but that no scheduler serves yet: refused by name, at once."""

import json
import pathlib
import shutil

import pytest

import jdllm
from jdllm import errors
from jdllm.train import step

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"


@pytest.mark.parametrize(
    ("family", "architecture"), [("llada", "LLaDAModelLM"), ("dream", "DreamModel")]
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_full_attention_is_refused_before_weights_are_read(
    family, architecture, load_format, tmp_path
):
    shutil.copy(GOLDENS / family / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn: reading it would be another error")
    with pytest.raises(errors.ConfigError, match=f"{architecture}.*full attention.*load_model"):
        jdllm.Engine(model_path=str(tmp_path), load_format=load_format)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_training_is_refused(family):
    hf_config = json.loads((GOLDENS / family / "config.json").read_text())
    with pytest.raises(errors.ConfigError, match="training is block-causal"):
        step.build_network(hf_config, "float32")
