"""The commands: one entry, help and default for every flag, flags of SGLang and vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import runpy
import subprocess
import sys
import tomllib

import pytest
from support import docs_tables, snippets

from jdllm import __main__, errors, version
from jdllm.bench import one_batch
from jdllm.checkpoint import source
from jdllm.foreign import flags
from jdllm.host import arguments
from jdllm.options import config
from jdllm.server import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAINS = snippets.MAINS


@pytest.mark.parametrize("words", MAINS, ids=" ".join)
def test_every_flag_has_a_help_text_with_its_default(words):
    parser = snippets.parser_of(words)
    assert parser.prog == " ".join(("jdllm", *words))
    formatter = arguments.Formatter("")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert len(shown) > 2  # `jdllm plot` has two of its own
    for action in shown:
        if "--help" in action.option_strings:
            continue
        text = formatter._get_help_string(action)
        own, _, rest = text.partition(" (default: ")
        named = rest.endswith(")") or "(default)" in text or text.endswith(" (required)")
        assert named and len(own) > 3, f"{action.option_strings}: {text!r}"
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            assert f"(default: {action.default}" in text


@pytest.mark.parametrize("words", MAINS, ids=" ".join)
def test_the_help_shows_several_values_where_several_are_taken(words, capsys):
    parser = snippets.parser_of(words)
    formatter = arguments.Formatter("")
    shown = [a for a in parser._actions if a.nargs == "+" and a.help != argparse.SUPPRESS]
    for action in shown:
        value = {"KEY=VALUE": "a=1", "RESOLUTIONS": "8x8"}.get(str(action.metavar), "1")
        takes = True
        try:
            with parser._nothing_required():
                parser.parse_known_args([*action.option_strings[:1], value, value])
        except SystemExit:
            takes = False
        assert ("..." in formatter._format_args(action, "X")) == takes, action
    if words == ("serve",):
        assert "--served-model-name NAME\n" in parser.format_help()
        assert "takes one name, not 2" in capsys.readouterr().err


def test_the_default_in_the_help_is_the_one_of_the_dataclass():
    texts = {a.dest: a.help for a in snippets.parser_of(("serve",))._actions}
    for cls in (config.EngineConfig, config.ServerConfig):
        for field in dataclasses.fields(cls):
            if field.default not in (None, "") and not isinstance(field.default, bool):
                assert f"(default: {field.default})" in texts[field.name]


def test_the_table_of_commands_names_modules_and_is_complete():
    assert set(__main__.COMMANDS) == set(MAINS)
    for words, (module, _) in __main__.COMMANDS.items():
        main = MAINS[words]
        assert main.__module__ in (module, f"{module}.__main__", "jdllm.server.cli")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jdllm": "jdllm.__main__:main"}


@pytest.mark.parametrize("words", MAINS, ids=" ".join)
def test_a_command_runs_its_module_with_the_rest_of_the_line(words, monkeypatch):
    seen = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: seen.append((name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["jdllm", *words, "--flag", "eval"])
    __main__.main()
    assert seen == [(__main__.COMMANDS[words][0], ["--flag", "eval"])]


def test_ctrl_c_while_a_command_is_imported_is_one_line(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runpy, "run_module", interrupted)
    monkeypatch.setattr(sys, "argv", ["jdllm", "bench", "serving"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "jdllm bench serving: error: interrupted\n"


def test_the_command_answers_without_loading_anything():
    """`jdllm --version` must not import jax, which takes seconds."""
    program = "import sys; sys.modules['jax'] = None; from jdllm import __main__; __main__.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"jdllm {version.__version__}\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["serv"], "did you mean 'serve'?"),
        (["bench", "one"], "did you mean 'bench one-batch'?"),
        (["--versio"], "did you mean --version?"),
        (["x" * 500], "unknown command"),
    ],
)
def test_a_wrong_command_is_answered_with_the_nearest(argv, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jdllm", *argv])
    with pytest.raises(SystemExit) as exit_:
        __main__.main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert text in error and len(error) < 400


@pytest.mark.parametrize("argv", [[], ["--help"], ["bench"]])
def test_the_help_lists_all_commands(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jdllm", *argv])
    try:
        __main__.main()
    except SystemExit as exit_:
        assert exit_.code == 0
    text = capsys.readouterr().out
    for words in __main__.COMMANDS:
        assert " ".join(words) in text


# The server's is in `test_cli.py`: it ends its own process.
WRONG_VALUES = {
    ("eval",): ["--task", "gsm8k", "--output-dir", "out", "--data", "absent"],
    ("bench", "serving"): ["--profile"],
    ("bench", "images"): ["--profile"],
    ("bench", "one-batch"): ["--profile"],
    ("bench", "offline-throughput"): ["--profile"],
    ("plot",): ["absent"],
    ("train",): ["--config", "absent"],
    ("convert",): ["--model-path", "absent", "--output", "out"],
}


@pytest.mark.parametrize("words", WRONG_VALUES, ids=" ".join)
def test_errors_after_parsing_begin_as_those_of_parsing_do(words, tmp_path, monkeypatch, capsys):
    assert WRONG_VALUES.keys() == MAINS.keys() - {("serve",)}
    monkeypatch.chdir(tmp_path)
    assert MAINS[words](WRONG_VALUES[words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        MAINS[words](["--absent-flag"])
    parsing = capsys.readouterr().err.splitlines()[-1]
    beginning = f"jdllm {' '.join(words)}: error: "
    assert error.startswith(beginning) and parsing.startswith(beginning)


@pytest.mark.parametrize("words", MAINS, ids=" ".join)
def test_an_unknown_flag_is_answered_with_the_nearest(words, capsys):
    parser = snippets.parser_of(words)
    names = [name for action in parser._actions for name in action.option_strings[:1]]
    flag = next(name for name in names if len(name) > 8)
    with pytest.raises(SystemExit) as exit_:
        parser.refuse([f"{flag}x", "7"])
    assert exit_.value.code == 2
    assert f"unknown option '{flag}x'; did you mean {flag}?" in capsys.readouterr().err


def test_a_mistyped_flag_is_named_before_the_missing_one(capsys):
    parser = snippets.parser_of(("eval",))
    for argv, text in (
        (["--taks", "arithmetic", "--output-dir", "x"], "unknown option '--taks'; did you mean"),
        (["--task", "arithmetic"], "the following arguments are required: --output-dir"),
    ):
        with pytest.raises(SystemExit) as exit_:
            parser.parse(argv)
        assert exit_.value.code == 2
        assert text in capsys.readouterr().err
    options = parser.parse(["--task", "arithmetic", "--output-dir", "x", "--dllm", "a=1", "b=2"])
    assert options.dllm == ["a=1", "b=2"]


def test_the_help_names_one_default_model_and_every_bundled_one():
    text = cli.HELP["model_path"]
    models, default = text.removesuffix(")").split(" (default: ")
    assert default == source.resolve(None).name
    for folder in source.bundled_model().parent.iterdir():
        if folder.is_dir():
            assert folder.name in models.split(": ")[1].split(", ")


# Command lines as they stand in the documentation of others, and what they mean here.
PASTED = {
    "--model-path inclusionAI/LLaDA2.0-mini --trust-remote-code --dllm-algorithm LowConfidence "
    "--mem-fraction-static 0.8 --max-running-requests 32 --attention-backend flashinfer "
    "--cuda-graph-bs 1 2 4 8 --tp-size 1 --host 0.0.0.0 --port 30000 --watchdog-timeout 600": {
        "model_path": "inclusionAI/LLaDA2.0-mini",
        "trust_remote_code": True,
        "mem_fraction_static": 0.8,
        "max_running_requests": 32,
    },
    "--model inclusionAI/LLaDA2.1-mini --dllm-algorithm JointThreshold --dllm-fdfo "
    "--disable-cuda-graph --enable-torch-compile --cuda-graph-max-bs=16 --sampling-backend pytorch "
    "--moe-runner-backend triton --kv-cache-dtype auto --dp-size 1 --ep-size 1 --device cuda "
    "--schedule-conservativeness 0.3 --stream-interval 4": {
        "model_path": "inclusionAI/LLaDA2.1-mini",
        "dllm_algorithm": "JointThreshold",
    },
    "GSAI-ML/LLaDA-8B-Instruct --max-model-len 2048 --gpu-memory-utilization 0.9 "
    "--max-num-seqs 16 --tensor-parallel-size 1 --max-num-batched-tokens 4096 --seed 3 "
    "--tokenizer some/where --served-model-name llada --dtype half --no-enable-prefix-caching "
    "--enforce-eager --disable-log-requests --swap-space 4 --no-async-scheduling": {
        "model_path": "GSAI-ML/LLaDA-8B-Instruct",
        "context_length": 2048,
        "mem_fraction_static": 0.9,
        "max_running_requests": 16,
        "chunked_prefill_size": 4096,
        "random_seed": 3,
        "tokenizer_path": "some/where",
        "served_model_name": "llada",
        "dtype": "float16",
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
    },
    "--model-path Tongyi-MAI/Z-Image-Turbo --num-gpus 1 --backend diffusers "
    "--dit-layerwise-offload true --text-encoder-cpu-offload --vae-cpu-offload=false --warmup "
    "--warmup-resolutions 1024x1024 512x512 --enable-torch-compile true --ulysses-degree=1 "
    "--batching-mode dynamic --batching-max-size 4 --dynamic-batch-delay-ms 5 --lora-scale 1.0 "
    "--enable-batching-metrics --attention-backend fa --model-type diffusion --webui false": {
        "model_path": "Tongyi-MAI/Z-Image-Turbo",
        "warmup_resolutions": "1024x1024,512x512",
        "batching_mode": "dynamic",
        "batching_max_size": 4,
        "batching_delay_ms": 5.0,
        "enable_batching_metrics": True,
        "text_encoder_cpu_offload": True,
    },
    "--port 5 my-model --enable-prefix-caching --async-scheduling": {
        "model_path": "my-model",
        "disable_radix_cache": False,
    },
}


@pytest.mark.parametrize("line", PASTED, ids=lambda line: line.split()[1])
def test_a_pasted_command_line_starts(line):
    options = cli.parse(line.split())
    assert {name: getattr(options.engine, name) for name in PASTED[line]} == PASTED[line]
    given = {word.partition("=")[0] for word in line.split() if word.startswith("--")}
    noted = {note.split()[0].rstrip(":") for note in options.notes}
    assert noted <= given and len(noted) == len(options.notes)
    for flag in given - noted:  # whatever has no note sets an option
        name = flag[2:].replace("-", "_").removeprefix("no_")
        field = cli.ALIASES.get(name, flags.OPPOSITES.get(name, name))
        assert options.sources[field] == "flag"


def test_each_note_says_what_happens_instead():
    argv = ["--attention-backend", "fa3", "--dp-size", "1", "--swap-space=0", "--dllm-fdfo"]
    options = cli.parse(argv)
    assert set(options.notes) == {
        "--attention-backend: kernels are chosen by device and shape; the log shows the choice",
        "--dp-size 1: so it is anyway",
        "--swap-space: a preempted request is computed again; nothing is swapped to the host",
        "--dllm-fdfo: rows never wait for one another (always so)",
    }


@pytest.mark.parametrize("name", flags.NEUTRAL_VALUES)
def test_a_value_that_asks_for_something_else_is_refused(name):
    flag = flags.spelled(name)
    for value in flags.NEUTRAL_VALUES[name]:
        assert cli.parse([flag, value]).notes == (f"{flag} {value}: so it is anyway",)
    with pytest.raises(errors.ConfigError, match=f"{flag} other is not supported: .{{10,}}"):
        cli.parse([flag, "other"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--num-gpus 2", "use --tp-size"),
        ("--webui", "page of every server is at /"),
        ("--vae-path x/y", "copy of the pipeline folder"),
        ("--cache-dit-config x.yaml", "use --enable-step-cache"),
        ("--lora-path x/y", "LoRA is not supported"),
        ("--output-path outputs", "nothing is written to a disk"),
        ("--dit-precision bf16", "use --dtype"),
    ],
)
def test_flags_of_servers_of_images_are_refused_with_what_replaces_them(words, reason):
    with pytest.raises(errors.ConfigError, match=reason):
        cli.parse(words.split())


@pytest.mark.parametrize(
    "name", ["speculative_num_steps", "lora_paths", "ssl_keyfile", "hicache_x"]
)
def test_whole_families_of_flags_are_refused_by_name(name):
    flag = flags.spelled(name)
    with pytest.raises(errors.ConfigError, match=f"{flag} is not supported: .{{10,}}"):
        cli.parse([flag, "1"])


def test_a_flag_is_an_option_or_foreign_and_never_both():
    classes = (config.EngineConfig, config.ServerConfig)
    options = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert set(cli.ALIASES.values()) | set(flags.OPPOSITES.values()) <= options
    foreign = flags.names() | set(flags.REFUSED)
    others = {*cli.ALIASES, *flags.OPPOSITES}
    assert foreign & (options | others) == set()
    assert others & options == set()
    assert [name for name in options if name.startswith(tuple(flags.REFUSED_PREFIXES))] == []
    listed = [name for group in flags.SPEED for name, _ in group.flags()]
    assert len(listed) == len(set(listed)) > 50
    assert set(listed) & {*flags.REFUSED, *flags.NEUTRAL_VALUES} == set()


def test_a_file_may_hold_what_a_command_line_may(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "attention-backend: fa3\ncuda-graph-bs: [1, 2]\ndp-size: 1\nmax-model-len: 99\n"
        "enable-prefix-caching: false\n"
    )
    options = cli.parse(["--config", str(path)])
    assert options.engine.context_length == 99
    assert options.engine.disable_radix_cache is True
    assert [note.split()[0].rstrip(":") for note in options.notes] == [
        "--attention-backend",
        "--cuda-graph-bs",
        "--dp-size",
    ]
    path.write_text("dp-size: 2\n")
    with pytest.raises(errors.ConfigError, match="--dp-size 2 is not supported"):
        cli.parse(["--config", str(path)])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["a", "b"], "unexpected argument 'a'"),
        (["a", "--model-path", "b"], "the model is both 'a' and --model-path 'b'"),
        (["--served-model-name", "a", "b"], "takes one name"),
        (["--max-model-length", "5"], "did you mean --max-model-len?"),
        (["--quantisation", "fp8"], "did you mean --quantization?"),
        (["--" + "y" * 5000], "unknown option"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.parse(argv)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert text in error and len(error) < 500


def test_the_benchmarks_in_process_take_the_same_flags(capsys):
    argv = ["--model=m", "--max-model-len=64", "--attention-backend=fa3", "--seed=5"]
    options = one_batch.parse_args(argv)
    assert (options.model_path, options.context_length, options.seed) == ("m", 64, 5)
    assert "--attention-backend: kernels are chosen" in capsys.readouterr().err
    with pytest.raises(errors.ConfigError, match="--dp-size 2"):
        one_batch.parse_args(["--dp-size", "2"])


def test_the_tables_of_the_documentation_are_those_of_the_code():
    text = (ROOT / "docs" / "flags.md").read_text()
    for table in (
        docs_tables.flag_aliases({"drain_timeout": "drain_timeout_s"}),
        docs_tables.foreign_flags(),
    ):
        assert table in text, f"put this into docs/flags.md:\n{table}"
