"""The names of the running replicas in this process, which Ray Serve tells only its routers.

Not in `ray_router.py`: Ray pickles that module by value, so what a router writes to a variable of
it, nobody else reads.
"""

from __future__ import annotations

# (application, deployment) -> names.
RUNNING: dict[tuple[str, str], tuple[str, ...]] = {}
