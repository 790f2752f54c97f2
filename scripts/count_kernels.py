"""Counts the kernels of launches, compiled for an H200 without one.

    python scripts/count_kernels.py --model-path configs/llada-8b --rows 1
    python scripts/count_kernels.py --model-path configs/llada2.0-mini --rows 4 --list
    python scripts/count_kernels.py --model-path configs/z-image-turbo --side 512 --rows 4

Inside a CUDA graph each small kernel costs 1 to 2 us, so the kernels of a step's rules are worth
counting. The script needs jax with its CUDA plugin (`pip install "jax[cuda13]"`), but no GPU.
Without one XLA picks GEMMs without timing them; everything else is what a GPU gets. The model has
`--layers` layers and its real vocabulary and widths.

The script prints the tree of loops: a launch's outer loop, inside it a loop for each compiled size,
and inside these the passes over the vocabulary. For each loop it counts the kernels and copies of
the condition and of the body, without those of inner loops; likewise for each branch of a choice.

Before it stands whether the launch is one CUDA graph. Where it is not, the host starts the parts,
and the rounds of loops that are no part of a graph, with what they hold. A copy of a slice that
moves with a loop is what keeps loops outside; convolutions (of images) are never part of a graph.

Of an image pipeline each kind of launch is compiled for images of `--side` pixels: encoding of
captions, modulation of a window of steps, a step, decoding. Each component has at most `--layers`
layers of a kind, the autoencoder all of its own. With `--text-encoder-cpu-offload` the scratch of
encoding, bytes of the device besides arguments and results, should not grow with the layers.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import compiled_launches  # noqa: E402  (after the platform is set)
import image_launches  # noqa: E402
import launch_graphs  # noqa: E402
import text_launches  # noqa: E402

from jdllm.checkpoint import source  # noqa: E402

FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}


def computations(text: str) -> tuple[str, dict[str, list[tuple[str, str, str]]]]:
    """Returns (the entry's name, the instructions (name, operation, line) of each computation)."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = head.group(2)
            entry = name if head.group(1) else entry
            found[name] = []
        elif one := re.match(r"^\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\(", line):
            found[name].append((one.group(1), one.group(2), line))
    return entry, found


def show(found: dict[str, Any], name: str, depth: int, lists: bool) -> None:
    """Prints the loops and branches that a computation holds, and what is in them."""
    for _, operation, line in found[name]:
        if operation == "while":
            condition, body = (_computation(line, part) for part in ("condition", "body"))
            head = f"loop: condition {len(kernels(found, condition))}, body"
            _show_part(found, body, "    " * depth + head, depth, lists)
        elif operation == "conditional":
            for branch in _branches(line):
                _show_part(found, branch, "    " * depth + "branch:", depth, lists)
        elif operation == "call":
            show(found, _computation(line, "to_apply"), depth, lists)


def _show_part(found: dict[str, Any], name: str, head: str, depth: int, lists: bool) -> None:
    """Prints how many kernels a part has, and of which kinds, then its own loops."""
    launched = kernels(found, name)
    kinds = dict(collections.Counter(kind for kind, _ in launched))
    sys.stdout.write(f"{head} {len(launched)} {kinds}\n")
    if lists:
        for kind, source in launched:
            sys.stdout.write(f"{'    ' * depth}  {kind:16s} {source}\n")
    show(found, name, depth + 1, lists)


def kernels(found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """Returns (kind, origin) of each kernel of a computation, without inner loops and branches."""
    launched = []
    for instruction, operation, line in found[name]:
        if operation == "call":
            launched += kernels(found, _computation(line, "to_apply"))
        elif operation not in FREE | {"while", "conditional"} and not operation.endswith("-done"):
            source = re.search(r'op_name="([^"]*)"', line)
            launched.append((operation, source.group(1)[-70:] if source else instruction))
    return launched


def _branches(line: str) -> list[str]:
    """Returns the names of the computations that a conditional has as its branches."""
    if several := re.search(r"branch_computations={([^}]*)}", line):
        return [name.strip().removeprefix("%") for name in several.group(1).split(",")]
    return [_computation(line, f"{which}_computation") for which in ("true", "false")]


def _computation(line: str, attribute: str) -> str:
    """Returns the name of the computation that an instruction has as an attribute."""
    match = re.search(rf"{attribute}=%?([\w.\-]+)", line)
    assert match is not None, line
    return match.group(1)


def launches(args: argparse.Namespace) -> Iterable[compiled_launches.Launch]:
    """Returns the launch of a model that writes text, or all of an image pipeline."""
    if source.is_pipeline(args.model_path):
        shape = image_launches.Shape(
            rows=args.rows,
            side=args.side,
            caption_tokens=args.caption_tokens,
            is_guided=args.guided,
            is_cached=args.step_cache,
            is_offloaded=args.text_encoder_cpu_offload,
        )
        return image_launches.launches(args.model_path, shape, layers=args.layers)
    chosen = args.dllm_algorithm
    shape = text_launches.Shape(
        rows=args.rows,
        context_length=args.context_length,
        algorithms=tuple(chosen.split(",")) if chosen else None,
        with_logits=args.with_logits,
        is_prefill=args.prefill,
    )
    return [text_launches.launch(args.model_path, shape, layers=args.layers)]


def main() -> None:
    """Parses the command line, compiles, prints the loops."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--launch", help="only this one, as the script names it")
    parser.add_argument("--list", action="store_true", help="every kernel, with its origin")
    parser.add_argument(
        "--xla-option",
        type=lambda given: given.partition("=")[::2],
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one more for the compiler, without --",
    )
    text = parser.add_argument_group("models that write text")
    text.add_argument("--context-length", type=int, default=384)
    text.add_argument("--dllm-algorithm", help="default: LowConfidence or FullAttnMultiBlock")
    text.add_argument(
        "--with-logits", action="store_true", help="the launch of rows that need their logits"
    )
    text.add_argument("--prefill", action="store_true", help="the largest launch of prefill")
    images = parser.add_argument_group("image pipelines")
    images.add_argument("--side", type=int, default=1024, help="pixels")
    images.add_argument("--caption-tokens", type=int, default=64, help="unless captions are padded")
    images.add_argument("--guided", action="store_true", help="steps with a negative prompt")
    images.add_argument("--step-cache", action="store_true", help="steps with a step cache")
    images.add_argument(
        "--text-encoder-cpu-offload",
        action="store_true",
        help="encoding with the text encoders' weights in the host's memory",
    )
    args = parser.parse_args()
    sys.stdout.write(f"# {' '.join(sys.argv)}\n")
    names = []
    for launch in launches(args):
        names.append(launch.name)
        if args.launch in (None, launch.name):
            report(launch, dict(args.xla_option), lists=args.list)
    if args.launch not in (None, *names):
        raise SystemExit(f"--launch {args.launch}: there is {', '.join(names)}")


def report(launch: compiled_launches.Launch, options: Mapping[str, str], *, lists: bool) -> None:
    """Compiles a launch and prints what it holds."""
    compiled = compiled_launches.compiled(launch, options)
    entry, found = computations(compiled.program)
    graphs = launch_graphs.describe(launch_graphs.parse(compiled.thunks))
    once = kernels(found, entry)
    scratch = f"{compiled.scratch_bytes / 1e6:.1f} MB of scratch"
    lines = [f"{launch.name}: {len(once)} kernels once a launch, {scratch}", *graphs]
    sys.stdout.write("\n".join(lines) + "\n")
    if lists:
        for kind, origin in once:
            sys.stdout.write(f"  {kind:16s} {origin}\n")
    show(found, entry, 0, lists)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
