"""The options of an application: text or typed, all of `jdllm serve`, and nothing else."""

import dataclasses
import typing

import pytest

from jdllm import errors
from jdllm.options import config
from jdllm.replicas import options


def test_text_and_typed_values_mean_the_same():
    text = {
        "num_replicas": "2",
        "num_gpus": "0.5",
        "enable_metrics": "true",
        "context-length": "64",
    }
    typed = {"num_replicas": 2, "num_gpus": 0.5, "enable_metrics": True, "context_length": 64}
    assert options.parse(text) == options.parse(typed)
    made = options.parse(text)
    assert (made.replicas.num_replicas, made.engine.context_length) == (2, 64)
    assert made.server.enable_metrics is True


def test_every_option_of_the_engine_is_a_key():
    for field in dataclasses.fields(config.EngineConfig):
        if field.default is not None:
            made = options.parse({field.name: field.default})
            assert getattr(made.engine, field.name) == field.default


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_replica": "2"}, "did you mean 'num_replicas'"),
        ({"modelpath": "x"}, "did you mean 'model_path'"),
        ({"context_length": "many"}, "context_length='many'"),
        ({"context_length": 2.5}, "context_length=2.5"),
        ({"num_replicas": "0"}, "num_replicas=0"),
        ({"port": "8000"}, "http_options"),
        ({"replicas": "2"}, "num_replicas"),
        ({"min_replicas": "2"}, "max_replicas"),
        ({"max_replicas": "2", "num_replicas": "3"}, "not both"),
        ({"context-length": "8", "context_length": "8"}, "repeats"),
    ],
)
def test_what_is_wrong_is_named(given, told):
    with pytest.raises(errors.ConfigError) as caught:
        options.parse(given)
    assert told in str(caught.value)


def test_a_key_is_never_shown():
    with pytest.raises(errors.ConfigError) as caught:
        options.parse({"api_key": 12345})
    assert "12345" not in str(caught.value) and "api_key" in str(caught.value)


def test_scaling_aims_at_the_rows_of_a_replica():
    assert options.parse({}).autoscaling() is None
    made = options.parse({"max_replicas": "3", "max_running_requests": "16"})
    assert made.autoscaling() == {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 16,
    }
    with pytest.raises(errors.ConfigError, match="max_running_requests"):
        options.parse({"max_replicas": "3"}).autoscaling()
    with pytest.raises(errors.ConfigError, match="needs max_replicas"):
        options.parse({"target_ongoing_requests": "3"}).autoscaling()
    assert "target_ongoing_requests" in typing.get_type_hints(options.ReplicaConfig)
