"""Families that are served but not trained here: refused by name, at once."""

import json
import pathlib

import pytest

from jdllm import errors
from jdllm.train import step

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_training_is_refused(family):
    hf_config = json.loads((GOLDENS / family / "config.json").read_text())
    with pytest.raises(errors.ConfigError, match="training is block-causal"):
        step.build_network(hf_config, "float32")
