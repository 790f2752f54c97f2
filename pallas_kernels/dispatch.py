"""Which implementation of an op runs, and why not a better one.

A plain function of the forced choice, the target (platform, compute capability, jax version) and
the op's own limits; never an environment variable. "auto" takes the first implementation that
nothing speaks against. A forced choice that cannot run raises with the reason instead of falling
back, so a benchmark never measures the wrong kernel.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import compat

# Best first; "auto" never takes what comes after "xla".
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "add_rms_norm": ("mosaic_gpu", "xla"),
    "dense_matmul": ("mosaic_gpu", "xla"),
    "extend_attention": ("mosaic_gpu", "cudnn", "xla"),
    "grouped_matmul": ("mosaic_gpu", "xla", "dense"),
    "read_cancel_flag": ("mosaic_gpu", "xla"),
    "rotate_and_cache": ("mosaic_gpu", "xla"),
    "top_k_routing": ("mosaic_gpu", "xla"),
    "unembed_stats": ("mosaic_gpu", "xla"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a program is compiled for; `compute_capability` is (0, 0) off NVIDIA GPUs."""

    platform: str
    compute_capability: tuple[int, int]
    jax_version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The implementation that runs, and what spoke against each better one."""

    implementation: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return self.implementation + (f" ({reasons})" if reasons else "")


@functools.cache
def current_target() -> Target:
    """Returns the target of this process's default device."""
    device = jax.local_devices()[0]
    capability = str(device.compute_capability) if device.platform == "gpu" else "0.0"
    major, _, minor = capability.partition(".")
    return Target(
        platform=device.platform,
        compute_capability=(int(major), int(minor or 0)),
        jax_version=jax.__version__,
    )


def choose(
    op: str,
    implementation: str = "auto",
    *,
    refusals: Mapping[str, str | None] | None = None,
    target: Target | None = None,
) -> Choice:
    """Returns which implementation of `op` runs.

    `refusals` holds, by implementation, the op's own reason against this shape (None: none).
    Raises ValueError for a name that the op does not have and for a forced choice that cannot run.
    """
    names = IMPLEMENTATIONS[op]
    if implementation not in ("auto", *names):
        raise ValueError(
            f"{op}: unknown {implementation=}; known names are {', '.join(('auto', *names))}"
        )
    target = target or current_target()

    def refusal(name: str) -> str | None:
        return _target_refusal(name, target) or (refusals or {}).get(name)

    if implementation != "auto":
        if reason := refusal(implementation):
            raise ValueError(f"{op}: {implementation} cannot run here: {reason}")
        return Choice(implementation=implementation, refusals={})
    against: dict[str, str] = {}
    for name in names:
        reason = refusal(name)
        if reason is None:
            return Choice(implementation=name, refusals=against)
        against[name] = reason
    raise AssertionError(f"{op}: xla runs everywhere")


def dtype_refusal(dtype) -> str | None:
    """Returns why a GPU implementation, all of which take 16-bit activations only, cannot serve."""
    name = jnp.dtype(dtype).name
    if name in ("bfloat16", "float16"):
        return None
    return f"16-bit activations only: needs bfloat16 or float16, this is {name}"


def _target_refusal(name: str, target: Target) -> str | None:
    major, minor = target.compute_capability
    if name in ("mosaic_gpu", "cudnn") and not major:
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if name == "mosaic_gpu":
        if (major, minor) != (9, 0):
            return f"written for compute capability 9.0, this is {major}.{minor}"
        if not compat.supported(target.jax_version):
            return f"needs jax >= {compat.MIN_JAX_VERSION}, this is {target.jax_version}"
    if name == "cudnn" and major < 8:
        return f"needs compute capability 8.0 or later, this is {major}.{minor}"
    return None
