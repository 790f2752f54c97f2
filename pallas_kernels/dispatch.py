"""Which implementation of an op runs, why not a better one, and a record of what was chosen.

A choice is a plain function of the forced name, the device and the op's own limits; it never reads
an environment variable. "auto" takes the first implementation that can run. A forced choice that
cannot run raises with the reason instead of falling back, so a benchmark never measures the wrong
kernel.

An op chooses at every call, outside its own `jax.jit`: the cache of the jit would skip the choice
for shapes that it knows. So a program that is traced inside `record_choices` records every
implementation it was traced with.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import device as device_facts
from pallas_kernels.device import Device

# The best comes first; "auto" never takes an implementation that comes after "xla".
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "add_rms_norm": ("mosaic_gpu", "xla"),
    "all_reduce": ("mosaic_gpu", "xla"),
    "dense_matmul": ("mosaic_gpu", "xla"),
    "exchange_words": ("mosaic_gpu", "xla"),
    "extend_attention": ("mosaic_gpu", "cudnn", "xla"),
    "fp8_matmul": ("xla_fp8", "xla"),
    "grouped_matmul": ("mosaic_gpu", "xla", "dense"),
    "padded_attention": ("cudnn", "xla"),
    "read_cancel_flag": ("mosaic_gpu", "xla"),
    "rotate_and_cache": ("mosaic_gpu", "xla"),
    "top_k_routing": ("mosaic_gpu", "xla"),
    "unembed_stats": ("mosaic_gpu", "xla"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The implementation that runs, and the reason why each better one cannot."""

    implementation: str
    refusals: dict[str, str]

    @property
    def reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())

    def __str__(self) -> str:
        return self.implementation + (f" ({self.reasons})" if self.refusals else "")


Choices = dict[str, list[Choice]]  # by op: each different choice once, oldest first

_records: contextvars.ContextVar[tuple[Choices, ...]] = contextvars.ContextVar(
    "records", default=()
)


@contextlib.contextmanager
def record_choices() -> Iterator[Choices]:
    """Yields a record of the choices that ops make in this thread inside the block."""
    record: Choices = {}
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)


def describe_choices(launches: Sequence[Mapping[str, Sequence[Choice]]]) -> dict[str, str]:
    """Returns one line for each op, in alphabetical order: which implementations the launches run.

    `launches` holds the record of each launch. A line names the op's one implementation; if there
    are several, it also says how many launches run each. One launch may run several, for operands
    of different shapes. If there were several reasons for a choice, the line gives the first.
    """
    return {
        op: _line([record[op] for record in launches if record.get(op)])
        for op in sorted({op for record in launches for op in record})
    }


def _line(by_launch: list[Sequence[Choice]]) -> str:
    """Returns the line of one op, from its choices in each launch that has it."""
    found: Choices = {}
    for choice in (choice for choices in by_launch for choice in choices):
        known = found.setdefault(choice.implementation, [])
        if choice not in known:
            known.append(choice)
    parts = []
    for name in found:
        users = sum(any(one.implementation == name for one in choices) for choices in by_launch)
        count = f" in {users} of {len(by_launch)} launches" if len(found) > 1 else ""
        first, *others = found[name]
        reasons = first.reasons + (f"; and {len(others)} more" if others else "")
        parts.append(name + count + (f" ({reasons})" if first.refusals else ""))
    return ", ".join(parts)


def choose(
    op: str,
    implementation: str = "auto",
    *,
    refusals: Mapping[str, str | None] | None = None,
    device: Device | None = None,
) -> Choice:
    """Returns which implementation of `op` runs on a device; the default is this process's device.

    `refusals` gives, for an implementation, the op's own reason why it cannot serve this shape, or
    None. Raises ValueError for a name that the op does not have, and for a forced choice that
    cannot run.
    """
    choice = _choose(op, implementation, refusals or {}, device or device_facts.local_device())
    for record in _records.get():
        choices = record.setdefault(op, [])
        if choice not in choices:
            choices.append(choice)
    return choice


def _choose(
    op: str,
    implementation: str,
    refusals: Mapping[str, str | None],
    device: Device,
) -> Choice:
    names = IMPLEMENTATIONS[op]
    if implementation not in ("auto", *names):
        raise ValueError(
            f"{op}: unknown {implementation=}; known names are {', '.join(('auto', *names))}"
        )
    device_refusals = {
        "mosaic_gpu": device.hopper_refusal,
        "cudnn": device.cudnn_refusal,
        "xla_fp8": device.fp8_refusal,
    }

    def refusal(name: str) -> str | None:
        return device_refusals.get(name) or refusals.get(name)

    if implementation != "auto":
        if reason := refusal(implementation):
            raise ValueError(f"{op}: {implementation} cannot run here: {reason}")
        return Choice(implementation=implementation, refusals={})
    refused: dict[str, str] = {}
    for name in names:
        reason = refusal(name)
        if reason is None:
            return Choice(implementation=name, refusals=refused)
        refused[name] = reason
    raise AssertionError(f"{op}: xla runs everywhere")


def dtype_refusal(dtype: DTypeLike) -> str | None:
    """Returns why no GPU implementation serves this dtype, or None; all take 16-bit activations."""
    name = jnp.dtype(dtype).name
    if name in ("bfloat16", "float16"):
        return None
    return f"16-bit activations only: needs bfloat16 or float16, this is {name}"
