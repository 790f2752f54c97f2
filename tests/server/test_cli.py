"""The command line: sources and their order, refusals, messages."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys

import pytest

from jdllm import errors
from jdllm.foreign import flags
from jdllm.options import config
from jdllm.server import cli

FIELDS = {
    field.name: (cls, field)
    for cls in (config.EngineConfig, config.ServerConfig)
    for field in dataclasses.fields(cls)
}


def test_defaults_are_the_dataclasses():
    options = cli.parse([])
    assert options.engine == config.EngineConfig()
    assert options.server == config.ServerConfig()
    assert set(options.sources.values()) == {"default"}


def test_every_option_has_a_flag_and_a_help_text(capsys):
    assert set(cli.HELP) == set(FIELDS)
    with pytest.raises(SystemExit) as exit_:
        cli.parse(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert "--" + name.replace("_", "-") in text


def test_flags_and_aliases():
    argv = "--model m --tensor-parallel-size 1 --port 5 --mem-fraction-static 0.5"
    argv += " --disable-radix-cache --schedule-policy lpm --dllm-fdfo --drain-timeout 3"
    options = cli.parse(argv.split())
    assert options.engine.model_path == "m"
    assert options.engine.mem_fraction_static == 0.5
    assert options.engine.disable_radix_cache is True
    assert options.engine.schedule_policy == "lpm"
    assert (options.server.port, options.server.drain_timeout_s) == (5, 3.0)
    assert options.sources["model_path"] == "flag"
    assert options.sources["host"] == "default"
    assert cli.parse(["--model-path=x"]).engine.model_path == "x"


def test_file_values_and_their_precedence(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from-file\nport: 1\nenable-metrics: true\ndrain_timeout_s: 7\n"
        "dllm-algorithm-config: {threshold: 0.7}\nmax-total-tokens: null\n"
    )
    options = cli.parse(["--config", str(path), "--port", "2"])
    assert options.engine.model_path == "from-file"
    assert options.server.port == 2
    assert options.server.enable_metrics is True
    assert options.server.drain_timeout_s == 7.0
    assert options.engine.algorithm_options() == {"threshold": 0.7}
    assert options.sources["port"] == "flag"
    assert options.sources["model_path"] == "file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 5", "did you mean 'port'"),
        ("port: '5'", "port='5'"),
        ("enable-metrics: 1", "enable_metrics=1"),
        ("schedule-policy: best", "schedule_policy='best'"),
        ("model: a\nmodel-path: b", "repeats option model_path"),
        ("quantization: awq", "quantization='awq'"),
        ("quantization-param-path: a.json", "only by --quantization fp8"),
        ("- 1", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("log-level-http: loud", "log_level_http='loud'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=message.replace("[", r"\[")):
        cli.parse(["--config", str(path)])


def test_a_missing_file_is_named():
    with pytest.raises(errors.ConfigError, match="no such file"):
        cli.parse(["--config", "/nowhere.yaml"])


REFUSED = [n for n in flags.REFUSED if n not in flags.NEUTRAL_VALUES]


@pytest.mark.parametrize("name", [*REFUSED, "speculative_anything"])
def test_refused_flags_say_what_replaces_them(name):
    flag = "--" + name.replace("_", "-")
    for argv in ([flag], [flag, "1"], [f"{flag}=1"]):
        with pytest.raises(errors.ConfigError) as caught:
            cli.parse(argv)
        reason = flags.REFUSED.get(name, "diffusion models have no draft model")
        assert flag in str(caught.value)
        assert reason in str(caught.value)


@pytest.mark.parametrize("argv", [["--nonsense"], ["--port", "x"], ["--dtype", "int3"], ["a", "b"]])
def test_argparse_refuses_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.parse(argv)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_abbreviations_are_not_accepted():
    with pytest.raises(SystemExit):
        cli.parse(["--por", "5"])


@pytest.mark.parametrize(
    "argv", [["--max-running-requests", "0"], ["--port", "70000"], ["--page-size", "0"]]
)
def test_config_checks_apply(argv):
    with pytest.raises(errors.ConfigError):
        cli.parse(argv)


def test_the_description_names_sources_and_masks_keys():
    options = cli.parse(["--api-key", "secret", "--port", "7"])
    lines = options.describe()
    assert "port=7 (flag)" in lines
    assert "host='127.0.0.1' (default)" in lines
    assert "api_key=*** (flag)" in lines
    assert "admin_api_key=None (default)" in lines
    assert "secret" not in "".join(lines)
    assert len(lines) == len(FIELDS)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        pytest.param(["--tp", "64"], "tp_size=64 needs 64", marks=pytest.mark.campaign),
        pytest.param(
            ["--quantization", "fp8"], "quantization='fp8'", marks=pytest.mark.campaign
        ),  # another process
    ],
)
def test_the_program_exits_2_with_one_line(argv, text):
    done = subprocess.run(
        [sys.executable, "-m", "jdllm.serve", *argv], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("jdllm serve: error:")]
    assert text in line


@pytest.mark.campaign
def test_options_are_told_at_debug_level_and_no_key_is():
    with socket.socket() as taken:  # the server ends once it has told its options
        taken.bind(("127.0.0.1", 0))
        argv = [f"--port={taken.getsockname()[1]}", "--log-level=debug", "--api-key=secret"]
        command = [sys.executable, "-m", "jdllm.serve", *argv, "--attention-backend=fa3"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "cannot listen" in done.stderr
    told = [line for line in done.stderr.splitlines() if " option " in line]
    assert len(told) == len(FIELDS)
    assert "--attention-backend: kernels are chosen by device" in done.stderr
    assert "secret" not in done.stderr
