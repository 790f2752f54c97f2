"""Shows that every rule of `test_layering` bites on a small house with one fault."""

from __future__ import annotations

import pytest
from test_layering import (
    RULES,
    cycles,
    default_getattr,
    environment,
    full_inits,
    hidden_imports,
    jax_in_host,
    jit_elsewhere,
    kernels_import_jdllm,
    prints,
    relative_imports,
    too_long,
    upward_or_sideways,
    vague_names,
)

# Each row is a small house with one fault, and words its complaint must hold.
FAULTS = (
    (upward_or_sideways, {"jdllm/layers/a.py": "import jdllm.engine.b", "jdllm/engine/b.py": ""},
     "floor 2 imports jdllm/engine/b.py of floor 6"),
    (upward_or_sideways, {"jdllm/layers/a.py": "from jdllm.scheduler import b",
                          "jdllm/scheduler/b.py": ""}, "jdllm/scheduler/b.py"),
    (upward_or_sideways, {"jdllm/eval/a.py": "from jdllm import Engine", "jdllm/__init__.py": ""},
     "jdllm/__init__.py"),
    (upward_or_sideways, {"jdllm/eval/a.py": "from jdllm.server import app",
                          "jdllm/server/app.py": ""}, "jdllm/server/app.py"),
    (upward_or_sideways, {"jdllm/decoding/a.py": "from jdllm.models import llada2",
                          "jdllm/models/llada2.py": ""},
     "jdllm/models/llada2.py"),
    (upward_or_sideways, {"jdllm/eval/a.py": "from jdllm.engine import gone"}, "missing"),
    (upward_or_sideways, {"jdllm/attic/a.py": "X = 1"}, "not in the floor table"),
    (upward_or_sideways, {"jdllm/layers/a.py": "if TYPE_CHECKING:\n    import jdllm.serve",
                          "jdllm/serve.py": ""}, "jdllm/serve.py"),
    (cycles, {"jdllm/engine/a.py": "from jdllm.engine import b",
              "jdllm/engine/b.py": "import jdllm.engine.c",
              "jdllm/engine/c.py": "from jdllm.engine.a import x"},
     "jdllm/engine/a.py -> jdllm/engine/b.py -> jdllm/engine/c.py -> jdllm/engine/a.py"),
    (jax_in_host, {"jdllm/options/config.py": "import jax.numpy as jnp"},
     "jdllm/options/config.py -> jax.numpy"),
    (jax_in_host, {"jdllm/scheduler/a.py": "from jdllm.kv_cache import pool",
                   "jdllm/kv_cache/pool.py": "from jax import lax"}, "pool.py -> jax"),
    (jax_in_host, {"jdllm/scheduler/a.py": "from jdllm.kv_cache import b",
                   "jdllm/kv_cache/__init__.py": "import flax", "jdllm/kv_cache/b.py": ""},
     "jdllm/kv_cache/__init__.py -> flax"),
    (kernels_import_jdllm, {"pallas_kernels/a.py": "from jdllm import errors"}, "jdllm"),
    (hidden_imports, {"jdllm/engine/a.py": "def f():\n    import json"}, "json"),
    (hidden_imports, {"jdllm/engine/a.py": "class A:\n  def f(self):\n    from os import path"},
     "os"),
    (hidden_imports, {"jdllm/engine/a.py": "m = importlib.import_module('x')"}, "by name"),
    (relative_imports, {"jdllm/engine/a.py": "from . import b"}, "a.py:1"),
    (jit_elsewhere, {"jdllm/layers/a.py": "@jax.jit\ndef f(): ..."}, "jax.jit"),
    (jit_elsewhere, {"jdllm/engine/a.py": "from jax import jit"}, "jax.jit"),
    (jit_elsewhere, {"jdllm/runner/a.py": "f = nnx.jit(g)"}, "nnx.jit"),
    (too_long, {"jdllm/engine/a.py": "x = 1\n" * 401}, "401"),
    (too_long, {"pallas_kernels/a.py": "x = 1\n" * 601}, "601"),
    (full_inits, {"jdllm/engine/__init__.py": "X = 1"}, "must be empty"),
    (environment, {"jdllm/engine/a.py": "os.environ.get('JDLLM_FAST')"}, "environment"),
    (environment, {"jdllm/engine/a.py": "x = os.getenv(name)"}, "environment"),
    (environment, {"jdllm/engine/a.py": "from os import environ"}, "environment"),
    (prints, {"jdllm/engine/a.py": "print('x')"}, "print"),
    (vague_names, {"jdllm/engine/utils.py": ""}, "utils"),
    (vague_names, {"jdllm/train/data.py": ""}, "data"),
    (default_getattr, {"jdllm/engine/a.py": "getattr(x, 'f', None)"}, "getattr"),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "sources", "words"), FAULTS)
def test_rule_bites(rule, sources, words):
    complaints = list(rule(sources))
    assert len(complaints) == 1, complaints
    assert words in complaints[0]


def test_rules_leave_a_sound_house_alone():
    sound = {
        "jdllm/__init__.py": "import importlib\nif TYPE_CHECKING:\n    import jdllm.engine.a\n"
        "def __getattr__(n): return importlib.import_module(n)",
        "jdllm/errors.py": "import os.path",
        "jdllm/version.py": "",
        "jdllm/spec.py": "import enum",
        "jdllm/decoding/a.py": "import jax\nfrom jdllm import spec\nimport jdllm.errors",
        "jdllm/runner/b.py": "from jax import jit\nimport jdllm.decoding.a\nf = jax.jit(g)",
        "jdllm/engine/a.py": "from jdllm.runner import b\nfrom jdllm import version\n"
        "os.environ['JAX_PLATFORMS']\nos.environ.get('HF_HOME')\ngetattr(x, 'f')",
        "jdllm/serve.py": "from jdllm.server import app\nprint('ready')",
        "jdllm/server/app.py": "from jdllm.engine import a",
        "pallas_kernels/c.py": "import jax\nx = 1\n" * 200,
    }
    for rule in RULES:
        assert list(rule(sound)) == [], rule.__name__
