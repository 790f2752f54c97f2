"""The file of --batching-config: which rules match, and what is wrong with a file."""

from __future__ import annotations

import json

import pytest

from jdllm import errors
from jdllm.options import batching_rules, config

ANY = {"model_contains": "Z-Image"}


def bound(*rules, width=1024, height=1024, tokens=4096, memory_gb=80.0, model="org/Z-Image-Turbo"):
    return batching_rules.most_images(
        batching_rules.parse({"schema_version": 1, "rules": list(rules)}),
        model=model, width=width, height=height, tokens=tokens, memory_gb=memory_gb,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ANY | {"max_batch_size": 4}, 4),
        (ANY | {"max_batch_size": 4, "calibration": {"gpu": "any"}}, 4),
        (ANY | {"max_batch_size": 4, "resolution": "*"}, 4),
        (ANY | {"max_batch_size": 4, "resolution": "1024x1024"}, 4),
        (ANY | {"max_batch_size": 4, "resolution": "512x512"}, None),
        (ANY | {"max_batch_size": 4, "max_cost": 9000}, 2),
        (ANY | {"max_batch_size": 4, "max_cost": 10}, 1),
        (ANY | {"max_batch_size": 4, "device_memory_gb_min": 80}, 4),
        (ANY | {"max_batch_size": 4, "device_memory_gb_min": 81}, None),
        (ANY | {"max_batch_size": 4, "device_memory_gb_max": 48}, None),
        (ANY | {"max_batch_size": 4, "offload": False}, 4),
        (ANY | {"max_batch_size": 4, "offload": True}, None),
        ({"model": "org/Z-Image-Turbo", "max_batch_size": 4}, 4),
        ({"model": "Z-Image-Turbo", "max_batch_size": 4}, None),
        ({"model_contains": "FLUX", "max_batch_size": 4}, None),
    ],
    ids=str,
)
def test_which_rules_match(rule, expected):
    assert bound(rule) == expected


def test_the_smallest_bound_of_all_that_match_counts():
    rules = [ANY | {"max_batch_size": size} for size in (8, 3, 5)]
    assert bound(*rules) == 3
    assert bound(rules[0], {"model_contains": "FLUX", "max_batch_size": 1}) == 8
    assert bound(ANY | {"max_batch_size": 2, "resolution": "64x32"}, width=64, height=32) == 2
    assert bound(ANY | {"max_batch_size": 2, "resolution": "64x32"}, width=32, height=64) is None
    unknown = ANY | {"max_batch_size": 2, "device_memory_gb_min": 500}
    assert bound(unknown, memory_gb=None) == 2


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ANY, "max_batch_size is missing"),
        (ANY | {"max_batchsize": 4}, "did you mean 'max_batch_size'"),
        (ANY | {"max_batch_size": 0}, "max_batch_size=0 must be an integer, 1 or more"),
        (ANY | {"max_batch_size": True}, "max_batch_size=True"),
        (ANY | {"max_batch_size": 2, "max_cost": "high"}, "max_cost='high'"),
        (ANY | {"max_batch_size": 2, "offload": "no"}, "offload='no'"),
        (ANY | {"max_batch_size": 2, "resolution": "1024"}, "resolution='1024'"),
        (ANY | {"max_batch_size": 2, "model": "x"}, "either model or model_contains"),
        ({"max_batch_size": 2}, "either model or model_contains"),
        (
            ANY | {"max_batch_size": 2, "device_memory_gb_min": 3, "device_memory_gb_max": 2},
            "device_memory_gb_min=3 is above",
        ),
        (5, "must be an object"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_rule_is_named(rule, message):
    with pytest.raises(errors.ConfigError, match=r"batching_config: rules\[1\]") as caught:
        bound(ANY | {"max_batch_size": 4}, rule)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"rule": []}', "did you mean 'rules'"),
        ('{"schema_version": 2, "rules": []}', "schema_version=2"),
        ('{"rules": []}', "one rule or more"),
        ('"rules"', "one rule or more"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, text, message):
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match="^batching_config: ") as caught:
        config.EngineConfig(batching_config=str(path))
    assert message in str(caught.value)


def test_a_file_holds_what_an_option_holds(tmp_path):
    rule = ANY | {"max_batch_size": 4}
    path = tmp_path / "rules.json"
    for content in ({"schema_version": 1, "rules": [rule]}, [rule]):
        path.write_text(json.dumps(content))
        found = config.EngineConfig(batching_config=str(path)).batching_rules()
        assert found == batching_rules.parse({"rules": [rule]})
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        config.EngineConfig(batching_config=str(tmp_path / "nowhere.json"))
