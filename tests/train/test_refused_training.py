"""Families and options that are served but not trained here: refused by name, at once."""

import json
import pathlib

import pytest

from jdllm import errors
from jdllm.train import config, step

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"


def hf_config(family):
    return json.loads((GOLDENS / family / "config.json").read_text())


def test_training_of_shifted_logits_is_refused():
    with pytest.raises(errors.ConfigError, match="DreamModel: .* logit row per position.*shifted"):
        step.build_network(hf_config("dream"), "float32")


def test_training_of_routers_without_a_bias_is_refused():
    with pytest.raises(errors.ConfigError, match="SDARMoeForCausalLM: .* bias of the router"):
        step.build_network(hf_config("sdar_moe"), "float32")
    step.build_network(hf_config("sdar"), "float32")


def test_routing_by_blocks_is_refused_by_name():
    with pytest.raises(errors.ConfigError, match="expert_capacity=8 is not supported in training"):
        step.build_network(hf_config("llada22"), "float32")


def test_noise_copies_of_full_attention_are_refused():
    network = step.build_network(hf_config("llada"), "float32")
    step.noise_config(network, config.from_mapping({"model_path": "x"}))
    with pytest.raises(errors.ConfigError, match="noise_copies=2 must be 1 for LLaDAModelLM"):
        step.noise_config(network, config.from_mapping({"model_path": "x", "noise_copies": 2}))
