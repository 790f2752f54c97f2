"""Which implementation of an op runs.

A plain function of the forced choice, the jax version and the platform; never an environment
variable. A forced choice that cannot run raises instead of falling back, so a benchmark never
measures the wrong kernel. Today every op has its XLA implementation only: a GPU kernel is added
by listing it in `IMPLEMENTATIONS` and choosing it for `"auto"` in `choose`.
"""

import jax

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "extend_attention": ("xla",),
    "grouped_matmul": ("xla", "dense"),
    "unembed_stats": ("xla",),
}
PLANNED = ("mosaic_gpu", "cudnn")


def choose(
    op: str,
    implementation: str = "auto",
    *,
    jax_version: str | None = None,
    platform: str | None = None,
) -> str:
    """Returns the implementation of `op` that runs; version and platform default to this process.

    Raises ValueError for a name no op knows and NotImplementedError for a kernel not built yet.
    """
    available = IMPLEMENTATIONS[op]
    if implementation == "auto":
        return "xla"
    if implementation in available:
        return implementation
    if implementation in PLANNED:
        jax_version = jax_version or jax.__version__
        platform = platform or jax.default_backend()
        raise NotImplementedError(
            f"{op}: no such kernel in this build, {implementation=} {jax_version=} {platform=}; "
            f"use one of {', '.join(('auto', *available))}"
        )
    raise ValueError(
        f"{op}: unknown {implementation=}; known names are "
        f"{', '.join(('auto', *available, *PLANNED))}"
    )


def describe() -> dict[str, str]:
    """Returns what "auto" means for every op in this process (start-up log, /server_info)."""
    return {op: choose(op) for op in IMPLEMENTATIONS}
