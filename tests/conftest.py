"""Set before any test module touches jax.

The Mosaic GPU interpreter blocks one CPU thread of XLA per simulated warpgroup. With fewer threads
than warpgroups (two clusters of three, and what runs beside them) it can wait for ever.
"""

import os

for variable in ("NPROC", "PJRT_NPROC"):  # the name changed between jax versions
    os.environ.setdefault(variable, "8")
