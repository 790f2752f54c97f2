"""What XLA leaves out and what jax keeps, so that compiling costs a test run little.

Without a GPU the suite compiles far longer than it runs, so XLA leaves out what would make its code
for the CPU faster. Its older way to write loops takes half the time and a third of the memory of
the newer one; jaxlib 0.11 has no such flag, and an unknown one ends the process.
`tests/server/test_live_server.py` has the code as users have it.

Compiled programs are kept in pytest's cache folder, so that what several modules compile, and what
the run before this one compiled, costs a load.
"""

import importlib.metadata
import os
import shutil

XLA_FLAGS = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def set_up(cache_folder: str | None) -> None:
    """Must run before jax is imported."""
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    # The Mosaic GPU interpreter blocks one CPU thread of XLA per simulated warpgroup. With fewer
    # threads than warpgroups (two clusters of three, and what runs beside them) it can wait for
    # ever. The variable's name changed between jax versions.
    for variable in ("NPROC", "PJRT_NPROC"):
        os.environ.setdefault(variable, "8")
    if cache_folder is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache_folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def flags_of_users() -> str:
    """Returns the XLA flags of the environment without those of a test run."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if flag not in XLA_FLAGS)
