"""Holds the house to its plan: floors, two worlds, file sizes, and other laws a machine can see.

The floor table below is the architecture as data. Files are parsed, never imported; each rule is a
function from sources to complaints, so `test_layering_rules.py` can show that each rule bites.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
Sources = Mapping[str, str]  # repository-relative path -> text

OPS = """
    all_reduce dense_matmul extend_attention fp8_matmul grouped_matmul padded_attention
    read_cancel_flag rotate_and_cache top_k_routing unembed_stats
"""
# (path or folder, floor, group). A file may import lower floors and its own group; the
# first row that fits a path counts.
FLOORS: tuple[tuple[str, int, str], ...] = (
    ("pallas_kernels/peers.py", -5, "peers"),
    ("pallas_kernels/hopper/", -4, "hopper"),
    # An op imports no other, except the norm beside a rotation or a sum, and exchanged statistics.
    ("pallas_kernels/add_rms_norm/", -2, "add_rms_norm"),
    *((f"pallas_kernels/{op}/", -1, op) for op in OPS.split()),
    ("pallas_kernels/exchange_words/", -2, "exchange_words"),
    ("pallas_kernels/__init__.py", 0, "pallas_kernels"),
    ("pallas_kernels/", -3, "dispatch"),
    *((f"jdllm/{name}.py", -6, "base") for name in ("errors", "spec", "value_checks", "version")),
    ("jdllm/foreign/", -5, "foreign"),
    ("jdllm/host/", -4, "host"),
    ("jdllm/algorithms/", -4, "algorithms"),
    ("jdllm/device/facts.py", -4, "device_facts"),
    ("jdllm/options/", -3, "options"),
    ("jdllm/device/devices.py", 1, "device"),
    ("jdllm/device/sharding.py", 1, "sharding"),
    ("jdllm/tasks/", 0, "tasks"),
    ("jdllm/plots/", 1, "plots"),
    ("jdllm/templates/", 1, "templates"),
    ("jdllm/decoding/", 1, "decoding"),
    ("jdllm/kv_cache/", 1, "kv_cache"),
    ("jdllm/checkpoint/", 1, "checkpoint"),
    ("jdllm/layers/", 2, "layers"),
    # A kind of rows knows no other kind, on the host as on the device.
    ("jdllm/scheduler/rows/block.py", 3, "block rows"),
    ("jdllm/scheduler/rows/canvas.py", 3, "canvas rows"),
    ("jdllm/scheduler/rows/image/", 3, "image rows"),
    ("jdllm/scheduler/rows/uniform.py", 3, "uniform rows"),
    ("jdllm/scheduler/", 2, "scheduler"),
    ("jdllm/models/", 3, "models"),
    ("jdllm/pipelines/", 4, "pipelines"),
    # Launches know no kind at all.
    ("jdllm/runner/launch/", 4, "launch"),
    ("jdllm/runner/block/", 5, "block"),
    ("jdllm/runner/canvas/", 5, "canvas"),
    ("jdllm/runner/uniform/", 5, "uniform"),
    *((f"jdllm/runner/{name}.py", 5, name) for name in ("model_runner", "expert_use")),
    ("jdllm/runner/image/", 5, "image"),
    ("jdllm/runner/", 4, "steps"),
    # Image models are trained with what serves them; text is trained without the engine's part.
    ("jdllm/train/scenes/", 6, "train"),
    ("jdllm/train/", 4, "train"),
    ("jdllm/client/", 6, "client"),
    ("jdllm/engine/", 6, "engine"),
    # Its flags are those of evaluation and of benchmarks in process, too.
    ("jdllm/server/cli.py", 6, "command line"),
    # HTTP itself, which knows no route and no state of the server.
    ("jdllm/server/edge/", 7, "edge"),
    ("jdllm/serve.py", 8, "server"),
    ("jdllm/server/", 8, "server"),
    ("jdllm/convert.py", 7, "convert"),
    ("jdllm/eval/", 7, "eval"),
    ("jdllm/bench/", 7, "bench"),
    ("jdllm/replicas/", 9, "replicas"),
    ("jdllm/ray_app.py", 9, "replicas"),
    ("jdllm/__main__.py", 10, "public"),
    ("jdllm/__init__.py", 10, "public"),
)
HOST_GROUPS = set(
    "base foreign host algorithms device_facts options tasks templates client".split()  # noqa: SIM905
)
HOST = (
    *(path for path, _, group in FLOORS if group in HOST_GROUPS),
    "jdllm/kv_cache/allocator.py",
    "jdllm/kv_cache/prefix_cache.py",
    "jdllm/scheduler/",
)
# grain imports jax, so it counts as jax here.
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "pallas_kernels"}
MAY_JIT = ("jdllm/runner/", "jdllm/train/", "jdllm/models/random_parts.py", "pallas_kernels/")
MAY_PRINT = (
    "jdllm/serve.py",
    "jdllm/convert.py",
    "jdllm/eval/__main__.py",
    "jdllm/train/__main__.py",
)
NON_EMPTY_INITS = ("jdllm/__init__.py", "pallas_kernels/__init__.py", "jdllm/decoding/__init__.py")
VAGUE_NAMES = {"utils", "util", "common", "manager", "managers", "data", "helpers", "misc"}
FOREIGN_VARIABLES = ("JAX_", "XLA_", "HF_", "HUGGINGFACE_", "CUDA_", "NCCL_")
MAX_LINES, MAX_KERNEL_LINES = 400, 600


@dataclasses.dataclass(frozen=True, slots=True)
class Import:
    """One imported module as a dotted name; `name` is what `from` took from it."""

    module: str
    name: str | None
    line: int
    is_typing_only: bool
    is_in_function: bool


# Reading sources


def python_files(*folders: str) -> dict[str, str]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def is_under(path: str, rows: tuple[str, ...]) -> bool:
    return any(path == row or (row.endswith("/") and path.startswith(row)) for row in rows)


def place_of(path: str) -> tuple[int, str] | None:
    return next((place for row, *place in FLOORS if is_under(path, (row,))), None)


@functools.cache  # most rules ask, for the same files
def imports_of(source: str) -> tuple[Import, ...]:
    def walk(node: ast.AST, typing_only: bool, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    for alias in child.names:
                        yield Import(alias.name, None, child.lineno, typing_only, in_function)
                case ast.ImportFrom():
                    module = "." * child.level + (child.module or "")
                    for alias in child.names:
                        yield Import(module, alias.name, child.lineno, typing_only, in_function)
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield from walk(child, True, in_function)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    yield from walk(child, typing_only, True)
                case _:
                    yield from walk(child, typing_only, in_function)

    return tuple(walk(ast.parse(source), False, False))


def resolve(sources: Sources, one: Import) -> str | None:
    """Returns the file an import of our own names, None for other packages."""
    if one.module.split(".")[0] not in ("jdllm", "pallas_kernels"):
        return None
    dotted = [one.module] if one.name is None else [f"{one.module}.{one.name}", one.module]
    for module in dotted:
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path in sources:
                return path
    return f"missing {one.module}"


def packages_of(sources: Sources, path: str) -> Iterator[str]:
    """Yields the `__init__.py` files that run before `path` does."""
    for parent in list(pathlib.PurePosixPath(path).parents)[:-1]:
        init = f"{parent}/__init__.py"
        if init in sources and init != path:
            yield init


def nodes(sources: Sources) -> Iterator[tuple[str, ast.AST]]:
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            yield path, node


def is_name(node: ast.AST, owner: str, *attributes: str) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == owner and node.attr in attributes
    return False


# Rules: sources -> complaints


def upward_or_sideways(sources: Sources) -> Iterator[str]:
    """Every edge goes to a lower floor or stays in its group; every file has a place."""
    for path, source in sources.items():
        place = place_of(path)
        if place is None:
            if source.strip():
                yield f"{path}: not in the floor table"
            continue
        floor, group = place
        for one in imports_of(source):
            target = resolve(sources, one)
            if target is None:
                continue
            if target.startswith("missing"):
                yield f"{path}:{one.line}: {target}"
                continue
            target_floor, target_group = place_of(target) or (99, "nowhere")
            if target_group != group and target_floor >= floor:
                yield f"{path}:{one.line}: floor {floor} imports {target} of floor {target_floor}"


def cycles(sources: Sources) -> Iterator[str]:
    edges = {
        path: {resolve(sources, one) for one in imports_of(text)} & sources.keys()
        for path, text in sources.items()
    }
    done: set[str] = set()

    def visit(path: str, trail: tuple[str, ...]) -> Iterator[str]:
        if path in trail:
            yield " -> ".join([*trail[trail.index(path) :], path])
        elif path not in done:
            for target in sorted(edges[path]):
                yield from visit(target, (*trail, path))
            done.add(path)

    for path in sources:
        yield from visit(path, ())


def jax_in_host(sources: Sources) -> Iterator[str]:
    """Host files reach no device library, however long the way."""
    for start in sources:
        if not is_under(start, HOST):
            continue
        trails = {start: (start,)}
        waiting = [start]
        while waiting:
            path = waiting.pop()
            found = [one for one in imports_of(sources[path]) if not one.is_typing_only]
            for one in found:
                if one.module.split(".")[0] in DEVICE_LIBRARIES:
                    yield f"{' -> '.join(trails[path])} -> {one.module}"
            targets = {resolve(sources, one) for one in found} & sources.keys()
            for target in [*targets, *packages_of(sources, path)]:
                if target not in trails:
                    trails[target] = (*trails[path], target)
                    waiting.append(target)


def kernels_import_jdllm(sources: Sources) -> Iterator[str]:
    for path, source in sources.items():
        for one in imports_of(source):
            if "pallas_kernels/" in path and one.module.split(".")[0] == "jdllm":
                yield f"{path}:{one.line}: {one.module}"


def hidden_imports(sources: Sources) -> Iterator[str]:
    """No import inside a function, none by name except in the lazy public package."""
    for path, source in sources.items():
        for one in imports_of(source):
            if one.is_in_function:
                yield f"{path}:{one.line}: imports {one.module} inside a function"
    for path, node in nodes(sources):
        by_name = is_name(node, "importlib", "import_module") or (
            isinstance(node, ast.Name) and node.id == "__import__"
        )
        if by_name and path != "jdllm/__init__.py":
            yield f"{path}:{node.lineno}: imports by name"


def relative_imports(sources: Sources) -> Iterator[str]:
    for path, source in sources.items():
        for one in imports_of(source):
            if one.module.startswith("."):
                yield f"{path}:{one.line}: {one.module}"


def jit_elsewhere(sources: Sources) -> Iterator[str]:
    for path, node in nodes(sources):
        imported = isinstance(node, ast.ImportFrom) and (
            node.module == "jax" and any(alias.name in ("jit", "pmap") for alias in node.names)
        )
        if (imported or is_name(node, "jax", "jit", "pmap")) and not is_under(path, MAY_JIT):
            yield f"{path}:{node.lineno}: jax.jit"
        if is_name(node, "nnx", "jit", "scan", "vmap"):
            yield f"{path}:{node.lineno}: nnx.{node.attr}"


def too_long(sources: Sources) -> Iterator[str]:
    for path, source in sources.items():
        limit = MAX_KERNEL_LINES if path.startswith("pallas_kernels/") else MAX_LINES
        if source.count("\n") > limit:
            yield f"{path}: {source.count(chr(10))} lines, at most {limit}"


def full_inits(sources: Sources) -> Iterator[str]:
    for path, source in sources.items():
        if path.endswith("__init__.py") and source.strip() and path not in NON_EMPTY_INITS:
            yield f"{path}: must be empty"


def environment(sources: Sources) -> Iterator[str]:
    """No variable of our own is read; those of JAX and HF may be, by literal name."""
    for path, source in sources.items():
        tree = ast.parse(source)
        allowed = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call | ast.Subscript)
            and any(
                isinstance(key, ast.Constant) and str(key.value).startswith(FOREIGN_VARIABLES)
                for key in ([node.slice] if isinstance(node, ast.Subscript) else node.args[:1])
            )
            for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            taken = isinstance(node, ast.ImportFrom) and (
                node.module == "os" and any(a.name in ("environ", "getenv") for a in node.names)
            )
            used = is_name(node, "os", "environ", "getenv", "environb") and id(node) not in allowed
            if taken or used:
                yield f"{path}:{node.lineno}: reads the environment"


def prints(sources: Sources) -> Iterator[str]:
    for path, node in nodes(sources):
        match node:
            case ast.Call(func=ast.Name(id="print")) if not is_under(path, MAY_PRINT):
                yield f"{path}:{node.lineno}: print"


def vague_names(sources: Sources) -> Iterator[str]:
    for path in sources:
        parts = set(path.removesuffix(".py").split("/"))
        if parts & VAGUE_NAMES or path.endswith(("_utils.py", "_util.py", "_helpers.py")):
            yield path


def default_getattr(sources: Sources) -> Iterator[str]:
    for path, node in nodes(sources):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, _, _, *_]):
                yield f"{path}:{node.lineno}: getattr with a default"


RULES: tuple[Callable[[Sources], Iterator[str]], ...] = (
    upward_or_sideways,
    cycles,
    jax_in_host,
    kernels_import_jdllm,
    hidden_imports,
    relative_imports,
    jit_elsewhere,
    too_long,
    full_inits,
    environment,
    prints,
    vague_names,
    default_getattr,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_keeps(rule):
    sources = python_files("jdllm", "pallas_kernels")
    assert len(sources) > 40
    assert list(rule(sources)) == []


def test_every_row_of_the_plan_names_a_file():
    paths = list(python_files("jdllm", "pallas_kernels"))
    plan = [row for row, *_ in FLOORS]
    for row in (*plan, *HOST, *MAY_JIT, *MAY_PRINT, *NON_EMPTY_INITS):
        assert any(is_under(path, (row,)) for path in paths), f"{row} names no file"
    assert len(set(plan)) == len(plan)


def test_tests_and_scripts_keep_to_their_size_and_kernels():
    """`.ci/run` also runs kernel tests where jax is all of what jdllm needs."""
    sources = python_files("tests", "scripts")
    assert [*too_long(sources), *kernels_import_jdllm(sources)] == []


def test_host_modules_load_without_jax():
    """The same law as `jax_in_host`, by running: it also sees what other packages import."""
    host = [path for path in python_files("jdllm") if is_under(path, HOST)]
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in host]
    assert "jdllm.scheduler.request" in names
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in sorted(DEVICE_LIBRARIES))
    program = f"import importlib, sys\n{blocked}\nfor n in {names!r}: importlib.import_module(n)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
