"""Set before any test module touches jax.

The Mosaic GPU interpreter blocks one CPU thread of XLA per simulated warpgroup. With fewer threads
than warpgroups (two clusters of three, and what runs beside them) it can wait for ever.

Without a GPU the suite compiles far longer than it runs, so XLA leaves out what would make its code
for the CPU faster. `tests/server/test_live_server.py` has it as users have it.
"""

import os
import shutil

for variable in ("NPROC", "PJRT_NPROC"):  # the name changed between jax versions
    os.environ.setdefault(variable, "8")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
