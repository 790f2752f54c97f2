"""`python -m jdllm.bench.images`: load on an image model, over HTTP or in process.

Flags, table and result keys are those of SGLang's image benchmark. With `--compare` the same load
runs with step-level batching and without.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jdllm.bench import command_line, running_server, server_flags, tables
from jdllm.bench.images import load, runs, targets
from jdllm.bench.images import options as image_options
from jdllm.bench.images import tables as image_tables
from jdllm.client import transport
from jdllm.engine.images.engine import ImageEngine
from jdllm.options import config
from jdllm.plots import batching, style

PLOT_NAME = "images-compare"
ON, OFF = "steps shared", "batch size 1"

Variant = tuple[str, Callable[[], contextlib.AbstractContextManager[targets.Target]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when nothing could be measured, 2 for a wrong option, 130 for Ctrl-C."""
    return command_line.finish("images", lambda: run(image_options.parse(argv)))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures, prints a table, appends each result to the file and returns them."""
    image_options.check(options)
    plot_name = PLOT_NAME if options.plot_file is None else options.plot_file
    if options.compare and plot_name:
        style.check_installed()
    tables.check_writable(options.output_file)
    asks = image_options.load(options).asks()
    logging.basicConfig(level=_log_level(options), force=True)
    tables.say(f"# {command_line.shown(sys.argv)}")
    results = []
    rates: list[float] = []
    for name, opened in variants(options, asks):
        with opened() as target:
            tables.say(f"# {_shown(target.describe())}")
            for result in measured(target, asks, options, rates):
                results.append({**image_options.settings(options), "batching": name, **result})
                tables.append(options.output_file, results[-1])
    if options.compare or options.loads:
        tables.say(f"\n{image_tables.several_runs(results)}")
    else:
        tables.say(image_tables.one_run(results[0]))
    if options.compare and plot_name:
        for path in batching.save(results, plot_name):
            tables.say(f"# wrote {path}")
    for result in results:
        if result["first_error"] is not None:
            sys.stderr.write(
                f"{result['failed_requests']} requests failed; the first: {result['first_error']}\n"
            )
    return results


def measured(
    target: targets.Target,
    asks: Sequence[load.Ask],
    options: argparse.Namespace,
    rates: list[float],
) -> Iterator[dict[str, Any]]:
    """Yields the figures of one server or engine: of the load, then of each share of `--loads`.

    `rates` are the requests per second of those shares; the first variant fills them in, so that
    the second one gets the same.
    """
    runs.warm_up(
        target, asks, counts=[options.warmup_requests], steps=options.warmup_inference_steps
    )
    if options.slo:
        asks = runs.with_slos(target, asks, scale=options.slo_scale or 3.0)
    about = {"target": target.describe()}
    about |= {"model": about["target"]["model"]}
    how = runs.Traffic(
        request_rate=options.request_rate,
        max_concurrency=options.max_concurrency,
        seed=options.seed,
        show_progress=not options.disable_tqdm,
    )
    first = runs.measure(target, asks, how)
    yield {"load": _load_name(how), "load_share": None, **about, **first}
    if not rates:
        rates += [share * first["throughput_qps"] for share in options.loads]
    for share, rate in zip(options.loads, rates, strict=True):
        how = dataclasses.replace(how, request_rate=rate, max_concurrency=None)
        found = runs.measure(target, asks, how)
        yield {"load": f"{share:g} of capacity", "load_share": share, **about, **found}


def variants(options: argparse.Namespace, asks: Sequence[load.Ask]) -> list[Variant]:
    """Returns what is measured: one server or engine, or two with `--compare`."""
    if image_options.is_in_process(options):
        for one in load.kinds(asks):
            targets.check_fields(one.extra)
        given = {"log_level": "warning", **image_options.engine_values(options)}
        configs = [config.EngineConfig(**given)]
        if options.compare:
            configs.append(dataclasses.replace(configs[0], batching_max_size=1))
        return [
            (_name(one.batching_max_size == 1), lambda one=one: in_process(one)) for one in configs
        ]
    return [
        (_name(place == 1), lambda url=url: over_http(options, url))
        for place, url in enumerate(image_options.base_urls(options))
    ]


@contextlib.contextmanager
def in_process(engine_config: config.EngineConfig) -> Iterator[targets.Target]:
    """Yields an engine of this process; it ends before the next one starts."""
    with ImageEngine(engine_config) as engine:
        yield targets.InProcess(engine)


@contextlib.contextmanager
def over_http(options: argparse.Namespace, url: str) -> Iterator[targets.Target]:
    """Yields a server once it answers."""
    headers = server_flags.headers(options)
    client = transport.Client(url, headers=headers, timeout_s=running_server.TIMEOUT_S)
    model = running_server.find_model(
        client, options.model, timeout_s=options.ready_check_timeout_sec
    )
    yield targets.Http(client, model)


def _name(is_off: bool) -> str:
    return OFF if is_off else ON


def _load_name(how: runs.Traffic) -> str:
    rate = how.settings()["request_rate"]
    return f"concurrency {how.max_concurrency}" + ("" if rate == "inf" else f", {rate:g} req/s")


def _log_level(options: argparse.Namespace) -> str:
    return image_options.engine_values(options).get("log_level", "warning").upper()


def _shown(about: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


if __name__ == "__main__":
    sys.exit(main())
