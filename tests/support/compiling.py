"""What XLA leaves out and what jax keeps, so that compiling costs a test run little.

Without a GPU the suite compiles far longer than it runs, so XLA leaves out what would make its code
for the CPU faster. Its older way to write loops takes half the time and a third of the memory of
the newer one; jaxlib 0.11 has no such flag, and an unknown one ends the process. What moves out of
loops, and a program cut into parts for LLVM, take a third of the rest. (A decode program of the
tiny LLaDA2: 7.7 s of CPU time without these two, 5.2 s with them.)
`tests/server/test_live_server.py` has the code as users have it.

Compiled programs are kept in pytest's cache folder, so that what several modules compile, and what
the run before this one compiled, costs a load.

What is traced and lowered is millions of objects, and Python's collector looks at the young ones
again and again: a quarter of that time. It looks less often here, and never at what collecting the
tests has made.
"""

import gc
import importlib.metadata
import os
import shutil
import sys

XLA_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_disable_hlo_passes=while-loop-simplifier,while-loop-invariant-code-motion",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
COLLECT_AFTER = (50_000, 10, 10)  # objects that are new, and collections of those


def set_up(cache_folder: str | None) -> None:
    """Must run before jax compiles anything."""
    gc.set_threshold(*COLLECT_AFTER)
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    # The Mosaic GPU interpreter blocks one CPU thread of XLA per simulated warpgroup. With fewer
    # threads than warpgroups (two clusters of three, and what runs beside them) it can wait for
    # ever. The variable's name changed between jax versions.
    for variable in ("NPROC", "PJRT_NPROC"):
        os.environ.setdefault(variable, "8")
    if cache_folder is not None:
        _set_option("jax_compilation_cache_dir", cache_folder)
        _set_option("jax_persistent_cache_min_compile_time_secs", 0.1)


def _set_option(name: str, value: str | float) -> None:
    """Sets an option of jax, here and for child processes, unless the environment has it.

    The `conftest.py` of a folder that is named on the command line may have imported jax already.
    """
    variable = name.upper()
    if variable in os.environ:
        return
    os.environ[variable] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name, value)


def flags_of_users() -> str:
    """Returns the XLA flags of the environment without those of a test run."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if flag not in XLA_FLAGS)
