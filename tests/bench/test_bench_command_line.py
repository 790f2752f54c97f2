"""Flags: honoured, or refused by name; nothing is ignored."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import pytest

from jdllm import errors
from jdllm.bench import command_line, offline_throughput, one_batch, serving, serving_options
from jdllm.bench.images import options as image_options
from jdllm.options import config

PARSERS = {
    "serving": serving_options.parse,
    "images": image_options.parse,
    "one_batch": one_batch.parse_args,
    "offline_throughput": offline_throughput.parse_args,
}
# A common command line of SGLang's documentation, per tool.
SGLANG = {
    "serving": "--backend sglang --dataset-name random --num-prompts 3000 --random-input 1024 "
    "--random-output 1024 --random-range-ratio 0.5 --request-rate 4 --max-concurrency 16 --seed 1 "
    "--warmup-requests 2 --flush-cache --disable-ignore-eos --output-file f --output-details "
    "--host 0.0.0.0 --port 30000 --model m --tokenizer t --disable-tqdm --tag x "
    "--served-model-name s --ready-check-timeout-sec 5 --flush-cache-timeout 9 --cache-report "
    "--disable-stream --temperature 0.5 --top-p 0.9 --header a=b --prompt-suffix p "
    "--apply-chat-template --sharegpt-output-len 3 --sharegpt-context-len 9 --tokenize-prompt",
    "images": "--backend sglang-image --dataset vbench --dataset-path p --task text-to-image "
    "--num-prompts 20 --port 1231 --width 512 --height 512 --max-concurrency 4 --seed 1",
    "one_batch": "--model-path m --load-format dummy --batch-size 1 12 14 --input-len 256 512 "
    "--output-len 32 256 --run-name test_run --result-filename r --dtype bfloat16 --tp-size 1",
    "offline_throughput": "--model-path m --num-prompts 10 --dataset-name random "
    "--random-input 1024 --random-output 1024 --result-filename r --skip-warmup --seed 3",
}


@pytest.mark.parametrize("tool", PARSERS)
def test_command_lines_of_sglang_parse(tool):
    options = PARSERS[tool](SGLANG[tool].split())
    assert options.seed in (1, 3, 42)


@pytest.mark.parametrize("tool", PARSERS)
@pytest.mark.parametrize(
    "flag",
    ["--profile", "--lora-name=a", "--gsp-num-groups", "--profile-steps", "--return-logprob"],
)
def test_flags_of_features_that_do_not_exist_are_refused_by_name(tool, flag):
    with pytest.raises(errors.ConfigError, match=f"{flag.partition('=')[0]} is not supported: "):
        PARSERS[tool]([flag])


def test_engine_flags_are_refused_as_the_server_refuses_them():
    with pytest.raises(errors.ConfigError, match="is not supported: weights are quantised only"):
        one_batch.parse_args(["--quantization-param-path", "a.json"])


@pytest.mark.parametrize("tool", PARSERS)
@pytest.mark.parametrize("wrong", [["--no-such-flag"], ["--num-promp", "3"], ["--seed", "-1"]])
def test_unknown_flags_and_wrong_values_are_refused(tool, wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        PARSERS[tool](wrong)
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--request-rate", "0"], ["--request-rate", "nan"], ["--ready-check-timeout-sec", "inf"]],
)
def test_numbers_that_mean_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        serving_options.parse(wrong)
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "nan", "inf"])
def test_a_factor_is_finite_as_results_hold_it(wrong):
    with pytest.raises(argparse.ArgumentTypeError):
        command_line.factor(wrong)


@pytest.mark.parametrize("tool", ["one_batch", "offline_throughput"])
def test_every_engine_option_that_has_an_effect_is_a_flag(tool):
    values = {"load_format": "dummy", "dtype": "bfloat16", "dllm_algorithm": "JointThreshold"}
    values |= {"schedule_policy": "lpm", "log_level": "debug", "mem_fraction_static": 0.5}
    for field in dataclasses.fields(config.EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        is_switch = isinstance(field.default, bool)
        is_text = "str" in str(field.type) and "Mapping" not in str(field.type)
        value = values.get(field.name, "text" if is_text else 1)
        if field.name == "dllm_algorithm_config":
            continue  # a file; the engine's own tests read one
        if field.name in command_line.WITHOUT_EFFECT:
            with pytest.raises(SystemExit):
                PARSERS[tool]([flag] if is_switch else [flag, "1"])
            continue
        options = PARSERS[tool]([flag] if is_switch else [flag, str(value)])
        built = command_line.engine_config(options)
        assert getattr(built, field.name) == (True if is_switch else value)


def test_the_command_line_wins_over_the_benchmarks_own_choice():
    options = one_batch.parse_args(["--batch-size", "2", "5", "--input-len", "33"])
    built = one_batch.engine_config(options)
    assert (built.max_running_requests, built.context_length) == (5, 64)
    options = one_batch.parse_args(["--max-running-requests", "7", "--context-length", "2048"])
    built = one_batch.engine_config(options)
    assert (built.max_running_requests, built.context_length) == (7, 2048)


def test_keys_are_masked_in_what_results_record():
    words = [
        "serving",
        "--api-key",
        "s3cret",
        "--api-key=s3cret",
        "--header",
        "Authorization=s3cret",
    ]
    shown = command_line.shown([*words, "--seed", "3"])
    assert "s3cret" not in shown
    assert shown.endswith("--seed 3")


def test_extra_bodies_are_merged_key_by_key():
    base = {"a": 1, "sampling_params": {"x": 1, "y": 2}}
    extra = {"b": 3, "sampling_params": {"y": 4}}
    assert command_line.merged(base, extra) == {
        "a": 1,
        "b": 3,
        "sampling_params": {"x": 1, "y": 4},
    }
    assert base["sampling_params"]["y"] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dllm", "threshold"], "--dllm 'threshold' is not KEY=VALUE"),
        (["--dllm", "treshold=1"], "did you mean 'threshold'"),
        (["--extra-request-body", "{"], "--extra-request-body is not valid JSON"),
        (["--extra-request-body", "[1]"], "--extra-request-body must be a JSON object"),
        (["--extra-request-body", '{"n": 2}'], "only 1 is measured"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
    ],
)
@pytest.mark.parametrize("tool", [serving, offline_throughput])
def test_wrong_options_end_with_code_2_before_anything_starts(
    tool, argv, message, capsys, tmp_path
):
    file = ["--output-file" if tool is serving else "--result-filename", str(tmp_path / "r")]
    url = ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]
    assert tool.main([*argv, *file, *(url if tool is serving else [])]) == 2
    assert message in capsys.readouterr().err


def test_the_load_generator_needs_neither_torch_nor_jax():
    blocked = "import sys; sys.modules.update(torch=None, jax=None); import jdllm.bench.serving"
    subprocess.run([sys.executable, "-c", blocked], check=True)
