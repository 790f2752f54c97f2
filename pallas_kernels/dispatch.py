"""Which implementation of an op runs, why not a better one, and a record of what was chosen.

A choice is a plain function of the forced name, the device and the op's own limits; never an
environment variable. "auto" takes the first implementation that nothing speaks against. A forced
choice that cannot run raises with the reason instead of falling back, so a benchmark never measures
the wrong kernel.

An op chooses each time it is called, before its own `jax.jit`, whose cache would hide a call of
known shapes. So whoever traces a program inside `record_choices` learns what it was traced with.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from pallas_kernels import device as device_facts

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
class Choice:
    """The implementation that runs, and what spoke against each better one."""

    implementation: str
    refusals: dict[str, str]

    @property
    def reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())

    def __str__(self) -> str:
        return self.implementation + (f" ({self.reasons})" if self.refusals else "")


Choices = dict[str, list[Choice]]  # by op, each choice once, in the order in which they were made

_records: contextvars.ContextVar[tuple[Choices, ...]] = contextvars.ContextVar(
    "records", default=()
)


@contextlib.contextmanager
def record_choices() -> Iterator[Choices]:
    """Yields a record that gets what ops of this thread choose inside the block."""
    record: Choices = {}
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)


def describe_choices(launches: Sequence[Mapping[str, Sequence[Choice]]]) -> dict[str, str]:
    """Returns by op, in alphabetical order, what the launches with these records run; a line each.

    An op with one implementation is that alone; else each one counts the launches that run it. A
    launch may run several, for operands of several shapes. Of several reasons the first is told.
    """
    return {
        op: _line([record[op] for record in launches if record.get(op)])
        for op in sorted({op for record in launches for op in record})
    }


def _line(of_launches: list[Sequence[Choice]]) -> str:
    """Returns the line of one op, from its choices in each launch that has it."""
    found: Choices = {}
    for choice in (choice for choices in of_launches for choice in choices):
        of_name = found.setdefault(choice.implementation, [])
        if choice not in of_name:
            of_name.append(choice)
    parts = []
    for name in found:
        users = sum(any(one.implementation == name for one in choices) for choices in of_launches)
        count = f" in {users} of {len(of_launches)} launches" if len(found) > 1 else ""
        first, *others = found[name]
        reasons = first.reasons + (f"; and {len(others)} more" if others else "")
        parts.append(name + count + (f" ({reasons})" if first.refusals else ""))
    return ", ".join(parts)


def choose(
    op: str,
    implementation: str = "auto",
    *,
    refusals: Mapping[str, str | None] | None = None,
    device: device_facts.Device | None = None,
) -> Choice:
    """Returns which implementation of `op` runs on a device, this process's if none is given.

    `refusals` holds, by implementation, the op's own reason against this shape (None: none).
    Raises ValueError for a name that the op does not have and for a forced choice that cannot run.
    """
    choice = _choose(op, implementation, refusals or {}, device or device_facts.local_device())
    for record in _records.get():
        of_op = record.setdefault(op, [])
        if choice not in of_op:
            of_op.append(choice)
    return choice


def _choose(
    op: str,
    implementation: str,
    refusals: Mapping[str, str | None],
    device: device_facts.Device,
) -> Choice:
    names = IMPLEMENTATIONS[op]
    if implementation not in ("auto", *names):
        raise ValueError(
            f"{op}: unknown {implementation=}; known names are {', '.join(('auto', *names))}"
        )
    of_device = {"mosaic_gpu": device.hopper_refusal, "cudnn": device.cudnn_refusal}

    def refusal(name: str) -> str | None:
        return of_device.get(name) or refusals.get(name)

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
