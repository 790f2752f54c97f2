"""`jdllm eval`: accuracy, TPF and NFE of a task, in process or against a server.

Tasks whose answers are pictures are run by `scenes.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.engine.engine import Engine
from jdllm.eval import backends, evaluation, model_args, presets, sandbox, store, summary, sweep
from jdllm.eval.scenes import evaluation as scenes
from jdllm.host import arguments
from jdllm.options import sampling_params
from jdllm.options.config import EngineConfig, from_mapping, parse_yaml
from jdllm.server import cli
from jdllm.tasks import registry

PROG = "jdllm eval"
# Options of the engine in this process; with --base-url they belong to the server.
ENGINE_FLAGS = (
    "model_path",
    "tokenizer_path",
    "revision",
    "load_format",
    "dtype",
    "context_length",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_tokens",
    "page_size",
    "dllm_algorithm",
    "dllm_algorithm_config",
    *sorted(scenes.ENGINE_FLAGS),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when the run failed, 2 for a wrong command line, 130 when interrupted."""
    options = make_parser().parse(argv)
    try:
        run(options)
    except (errors.ConfigError, errors.RequestError) as error:
        return _fail(error, 2)
    except (backends.BackendError, store.WriteError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; answers so far are kept, the same command goes on", 130)
    return 0


def make_parser() -> arguments.Parser:
    parser = arguments.Parser(PROG, __doc__)
    parser.add_argument(
        "--task",
        required=True,
        choices=sorted((*registry.TASKS, *registry.IMAGE_TASKS)),
        help="problems",
    )
    parser.add_argument("--data", metavar="FILE", help="the task's published file")
    parser.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help=f"ask the first N only (default: all; of scenes {scenes.DEFAULT_LIMIT})",
    )
    parser.add_argument(
        "--num-shots", type=_natural, default=0, metavar="K", help="solved examples in each prompt"
    )
    parser.add_argument("--shots-data", metavar="FILE", help="take the shots from this file")
    parser.add_argument("--output-dir", required=True, metavar="D", help="for the results")
    parser.add_argument(
        "--allow-unisolated-code",
        action="store_true",
        help="code tasks: run programs even where they cannot be kept from network and files",
    )
    parser.add_argument(
        "--model_args",
        "--model-args",
        dest="model_args",
        metavar="NAME=VALUE,...",
        help="a line of lm-eval or d3LLM; it may not repeat what another option says",
    )
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--max-new-tokens",
        type=_positive,
        metavar="N",
        help="longest answer (default: what the context leaves)",
    )
    group.add_argument("--temperature", type=float, help="0 is greedy (default: 0)")
    group.add_argument("--seed", type=int, help="of sampling (default: the engine's)")
    group.add_argument(
        "--dllm",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="denoising options, such as threshold=0.9",
    )
    group.add_argument(
        "--preset",
        choices=sorted(presets.PRESETS),
        help="settings of a published evaluation; what other options give comes before them",
    )
    group.add_argument("--sweep", metavar="KEY=A,B,C", help="one run per value, with a summary")
    group.add_argument(
        "--parallel", type=_positive, metavar="N", help="requests at a time (default: by backend)"
    )
    scenes.add_flags(parser.add_argument_group("pictures (--task scenes)"))
    group = parser.add_argument_group("against a server")
    group.add_argument(
        "--base-url", metavar="URL", help="such as http://127.0.0.1:30000 (default: in process)"
    )
    group.add_argument("--api", choices=("chat", "completion"), default="chat", help="route")
    group.add_argument("--api-key", help="bearer key of the server")
    group.add_argument(
        "--timeout-s", type=float, help="longest silence of the server (default: 600)"
    )
    group = parser.add_argument_group("in process, as for jdllm serve")
    cli.add_options(group, EngineConfig, only=ENGINE_FLAGS)
    return parser


def run(options: argparse.Namespace) -> None:
    """Runs the one point or the sweep that the command line asks for."""
    if options.task in registry.IMAGE_TASKS:
        for text in scenes.run(options, engine_flags=ENGINE_FLAGS):
            print(text)
        return
    scenes.refuse_own_flags(options)
    line = model_args.parse(model_args.split(options.model_args or ""))
    if {"mc_num", "is_check_greedy"} & line.likelihood.keys():
        raise errors.ConfigError(
            "--model_args: mc_num and is_check_greedy are for likelihoods, which "
            "python -m jdllm.eval.lm_eval computes"
        )
    model_args.check_machine(line, platform=jax.default_backend())
    flags = vars(options)
    engine_options = merged({name: flags.get(name) for name in ENGINE_FLAGS}, line.engine)
    server = merged({name: flags[name] for name in model_args.SERVER}, line.server)
    parallel = merged({"parallel": options.parallel}, line.parallel_option()).get("parallel")
    points = sweep_points(options)
    samplings = {label: sampling(options, changed, line) for label, changed in points.items()}
    questions = evaluation.load_questions(
        options.task,
        data=options.data,
        limit=options.limit,
        num_shots=options.num_shots,
        shots_data=options.shots_data,
    )
    if "base_url" in server and engine_options:
        raise errors.ConfigError(
            f"--{next(iter(engine_options)).replace('_', '-')} is for evaluation in process; "
            "with --base-url give it to the server"
        )
    if "base_url" not in server:
        engine_options = _with_algorithms(engine_options, samplings.values())
    settings = {**engine_options, "base_url": server.get("base_url"), "api": options.api}
    programs = None
    if questions.task.program is not None:
        programs = sandbox.Sandbox(isolates=not options.allow_unisolated_code)
        settings["code_isolation"] = "isolated" if programs.isolates else "limits only"
    root = store.make_folder(options.output_dir)
    results = {}
    with open_backend(options.api, server, engine_options, line) as backend:
        for label, one in samplings.items():
            results[label] = evaluation.evaluate(
                questions,
                backend,
                one,
                output_dir=root / label if options.sweep else root,
                settings=settings,
                parallel=parallel,
                programs=programs,
            )
            print(f"\n{label}\n" if options.sweep else "", summary.lines(results[label]), sep="")
    if options.sweep:
        name, points = sweep.labels(results)
        csv, table = summary.sweep_csv(name, points), summary.sweep_markdown(name, points)
        print(sweep.write(root, name, points, csv=csv, table=table, kind=sweep.TEXT))


def _with_algorithms(
    engine_options: dict[str, Any], samplings: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns options of an engine that runs what the samplings name, unless they say what it runs.

    An engine compiles the algorithm of its model; on a server others are asked for at its start.
    """
    named = dict.fromkeys(
        one["dllm"]["algorithm"] for one in samplings if "algorithm" in one["dllm"]
    )
    if not named or "dllm_algorithm" in engine_options:
        return engine_options
    return {**engine_options, "dllm_algorithm": ",".join(named)}


def merged(flags: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given flags and the names of `--model_args`; a name in both is an error."""
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given.keys() & line.keys():
        raise errors.ConfigError(f"--model_args and another option both give {name}")
    return {**given, **line}


@contextlib.contextmanager
def open_backend(
    api_name: str,
    server: dict[str, Any],
    engine_options: dict[str, Any],
    line: model_args.ModelArgs,
) -> Iterator[backends.Backend]:
    """Yields the one backend and shuts it down afterwards."""
    if "base_url" in server:
        yield backends.Http(**server, api_name=api_name)
        return
    config = from_mapping(EngineConfig, engine_options)
    logging.basicConfig(level=logging.WARNING)
    with Engine(config) as engine:
        model_args.check_mask_id(line, engine.spec.diffusion.mask_token_id)
        yield backends.InProcess(engine)


def sampling(
    options: argparse.Namespace, changed: dict[str, Any], line: model_args.ModelArgs
) -> dict[str, Any]:
    """Returns the sampling parameters of one point, checked by the engine's own rules."""
    own = {**dict(map(key_value, options.dllm)), **changed}
    flags = {name: vars(options)[name] for name in ("max_new_tokens", "temperature", "seed")}
    given = merged(own, line.sampling.get("dllm", {}))
    preset = presets.PRESETS.get(options.preset)
    values = {
        **dict.fromkeys(flags),
        "temperature": 0.0,
        "max_new_tokens": None if preset is None else preset.max_new_tokens,
        **merged(flags, {k: v for k, v in line.sampling.items() if k != "dllm"}),
        "dllm": given if preset is None else {**preset.options_for(options.task), **given},
    }
    sampling_params.SamplingParams.from_mapping(values)
    return values


def sweep_points(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns label -> changed dLLM options; without --sweep, one point without changes."""
    if options.sweep is None:
        return {"run": {}}
    name, values = key_value(options.sweep, as_text=True)
    cells = [cell.strip() for cell in values.split(",") if cell.strip()]
    if not cells:
        raise errors.ConfigError(f"--sweep {options.sweep!r} has no values")
    parsed = [parse_yaml(cell, f"--sweep {name}") for cell in cells]
    sweep.check_distinct(name, parsed)
    return {f"{name}={cell}": {name: value} for cell, value in zip(cells, parsed, strict=True)}


def key_value(text: str, *, as_text: bool = False) -> tuple[str, Any]:
    """Splits `key=value`; the value is parsed as a YAML scalar."""
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        known = ", ".join(("algorithm", *lookup.option_names()))
        raise errors.ConfigError(f"{text!r} is not KEY=VALUE; keys: {known}")
    return key, value if as_text else parse_yaml(value, text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _fail(error: object, code: int) -> int:
    arguments.report(PROG, error)
    return code


if __name__ == "__main__":
    sys.exit(main())
