"""Tensor parallelism: which part of each parameter a rank holds, and what ranks exchange.

Activations are replicated, weights are split. `RULES` says how, by the last two names of a
parameter's path, so all families share it. A split parameter is one array `[tp, *part]` whose
first axis lies on the mesh axis `tp`: a part may be any selection (every n-th expert, heads of q,
k and v, the same kv head on several ranks), and XLA knows one layout only. The steps run in a
`jax.shard_map` and see the parts.

Every rank must compute the same bits of what is replicated. Otherwise the ranks would leave a loop
at different steps, and the others would wait for ever. So a sum over ranks is made in rank order.

Letters: those of the whole project, and r a rank.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

import pallas_kernels
from jdllm import errors

AXIS = "tp"
SPLIT, REPLICATED = PartitionSpec(AXIS), PartitionSpec()
SIZES = (1, 2, 4, 8)  # those that an error proposes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Over how many ranks a model is split.

    `ep` is `tp` where whole experts are spread over the ranks, 1 where each expert is sliced.
    """

    tp: int = 1
    ep: int = 1

    @property
    def is_split(self) -> bool:
        return self.tp > 1


ONE_RANK = Shards()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads of one attention layer, before the split."""

    query: int
    kv: int
    dim: int

    def local(self, tp: int) -> Heads:
        """Returns the heads of a rank; with fewer kv heads than ranks, neighbours share one."""
        return Heads(query=self.query // tp, kv=max(self.kv // tp, 1), dim=self.dim)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which indices of one axis a rank holds; the rest of the parameter it holds whole.

    The axis consists of `segments` (length, parts): rank r has part `r * parts // tp` of each, one
    after the other. `strided`: it has every `tp`-th index from r on instead. `group`: the axis
    interleaves groups of so many gate rows and up rows (`pallas_kernels.gate_up_group`), and the
    part holds its gate rows, then its up rows.
    """

    axis: int
    segments: tuple[tuple[int, int], ...]
    strided: bool = False
    group: int | None = None

    def slices(self, rank: int, tp: int) -> Iterator[slice]:
        """Yields the slices of the axis that a rank holds, in their order in the part."""
        if self.strided:
            yield slice(rank, None, tp)
            return
        if self.group is not None:
            yield from self._gate_then_up(rank, tp, self.group)
            return
        start = 0
        for length, parts in self.segments:
            size, part = length // parts, rank * parts // tp
            yield slice(start + part * size, start + (part + 1) * size)
            start += length

    def _gate_then_up(self, rank: int, tp: int, group: int) -> Iterator[slice]:
        width = sum(length for length, _ in self.segments) // 2 // tp
        for is_up in (0, 1):
            row, end = rank * width, (rank + 1) * width
            while row < end:
                here = min(group - row % group, end - row)
                start = row // group * 2 * group + is_up * group + row % group
                yield slice(start, start + here)
                row += here


Rule = Callable[[tuple[int, ...], Heads, Shards], Cut]


def _even(axis: int, shape: tuple[int, ...], _: Heads, shards: Shards) -> Cut:
    return Cut(axis=axis, segments=((shape[axis], shards.tp),))


def _qkv(_: tuple[int, ...], heads: Heads, shards: Shards) -> Cut:
    kv = (heads.kv * heads.dim, min(heads.kv, shards.tp))
    return Cut(axis=0, segments=((heads.query * heads.dim, shards.tp), kv, kv))


def _qkv_and_mlp(shape: tuple[int, ...], heads: Heads, shards: Shards) -> Cut:
    return _and_mlp(_qkv(shape, heads, shards), shape, shards)


def _attended_and_mlp(shape: tuple[int, ...], heads: Heads, shards: Shards) -> Cut:
    how = Cut(axis=1, segments=((heads.query * heads.dim, shards.tp),))
    return _and_mlp(how, shape, shards)


def _and_mlp(how: Cut, shape: tuple[int, ...], shards: Shards) -> Cut:
    """Returns a cut of what belongs to heads, and of hidden values behind it, if there are any."""
    hidden = shape[how.axis] - sum(length for length, _ in how.segments)
    segments = ((hidden, shards.tp),) if hidden else ()
    return dataclasses.replace(how, segments=how.segments + segments)


def _qk(_: tuple[int, ...], heads: Heads, shards: Shards) -> Cut:
    return Cut(axis=0, segments=_qkv(_, heads, shards).segments[:2])


def _gate_and_up(shape: tuple[int, ...], _: Heads, shards: Shards) -> Cut:
    return Cut(axis=0, segments=((shape[0] // 2, shards.tp),) * 2)


def _interleaved(axis: int, shape: tuple[int, ...], _: Heads, shards: Shards) -> Cut:
    rows = shape[axis]
    group = pallas_kernels.gate_up_group(rows // 2)
    is_aligned = pallas_kernels.gate_up_group(rows // 2 // shards.tp) == group
    return Cut(axis=axis, segments=((rows, shards.tp),), group=None if is_aligned else group)


def _experts(sliced: Rule, shape: tuple[int, ...], heads: Heads, shards: Shards) -> Cut:
    # Strided, since contiguous blocks would put each of the router's groups on one rank, and a
    # token uses only some of the groups.
    if shards.ep > 1:
        return Cut(axis=0, segments=((shape[0], shards.tp),), strided=True)
    return sliced(shape, heads, shards)


_of = functools.partial
RULES: Mapping[str, Rule] = {
    "attention.w_qkv": _qkv,
    "attention.b_qkv": _qkv,
    "attention.w_qk": _qk,
    "attention.w_out": _of(_even, 1),
    "out_adapter.down": _of(_even, 1),  # as the weight that it adds to
    "mlp.w_gate_up": _gate_and_up,
    "mlp.w_down": _of(_even, 1),
    "shared_experts.w_gate_up": _of(_interleaved, 0),
    "shared_experts.w_down": _of(_even, 1),
    "experts.w_gate_up": _of(_experts, _of(_interleaved, 1)),
    "experts.w_down": _of(_experts, _of(_even, 2)),
    "lm_head": _of(_even, 0),
    # Transformers that make images.
    "feed_forward.w_gate_up": _gate_and_up,
    "feed_forward.w_down": _of(_even, 1),
    "qkv.weight": _qkv,
    "qkv.bias": _qkv,
    "qkv_mlp.weight": _qkv_and_mlp,
    "qkv_mlp.bias": _qkv_and_mlp,
    "out.weight": _attended_and_mlp,
    "mlp_in.weight": _of(_even, 0),
    "mlp_in.bias": _of(_even, 0),
    "mlp_out.weight": _of(_even, 1),
}
# Parameters with more than one axis that every rank holds whole; vectors without a rule are whole.
WHOLE = frozenset(
    [
        "word_embeddings",
        "out_adapter.up",
        "router.weight",
        "linear_1.weight",
        "linear_2.weight",
        "modulation.weight",
        "image_modulation.weight",
        "text_modulation.weight",
        "single_modulation.weight",
        "final_modulation.weight",
        "pooled_1.weight",
        "pooled_2.weight",
        "context_embedder.weight",
        "cap_embedder.weight",
        "cap_pad_token",
        "x_embedder.weight",
        "x_pad_token",
        "image_in.weight",
        "text_in.weight",
        "final_linear.weight",
        "proj_out.weight",
    ]
)


def rule_of(path: str) -> Rule | None:
    """Returns the rule of a parameter, None if every rank holds it whole."""
    return RULES.get(_leaf(path))


def cut_of(path: str, shape: tuple[int, ...], heads: Heads, shards: Shards) -> Cut | None:
    """Returns how a parameter is cut; raises ValueError for a matrix without a rule."""
    rule = rule_of(path)
    if rule is not None:
        return rule(shape, heads, shards)
    if len(shape) > 1 and _leaf(path) not in WHOLE:
        raise ValueError(f"sharding.RULES has no rule for {path} {list(shape)}")
    return None


def _leaf(path: str) -> str:
    return ".".join(path.split(".")[-2:])


def cut(array: np.ndarray, how: Cut, rank: int, tp: int) -> np.ndarray:
    """Returns the part of a rank; it is a view where one slice suffices."""
    lead = (slice(None),) * how.axis
    parts = [array[(*lead, one)] for one in how.slices(rank, tp)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=how.axis)


def local_shape(shape: tuple[int, ...], how: Cut, tp: int) -> tuple[int, ...]:
    """Returns the shape of every rank's part."""
    size = sum(len(range(*one.indices(shape[how.axis]))) for one in how.slices(0, tp))
    return (*shape[: how.axis], size, *shape[how.axis + 1 :])


def make_mesh(tp: int, devices: Sequence[jax.Device]) -> Mesh | None:  # pyright: ignore[reportInvalidTypeForm] # a class that jax assigns
    """Returns the mesh over the first `tp` devices of this host, None if one device is enough."""
    if tp > len(devices):
        kind = "GPUs" if devices[0].platform == "gpu" else f"devices ({devices[0].platform})"
        fits = ", ".join(str(size) for size in SIZES if size <= len(devices))
        raise errors.ConfigError(
            f"tp_size={tp} needs {tp} {kind}, JAX sees {len(devices)}; use tp_size {fits}"
        )
    return Mesh(np.array(devices[:tp]), (AXIS,)) if tp > 1 else None


def place(array: np.ndarray, how: Cut | None, mesh: Mesh) -> jax.Array:
    """Returns a parameter on the mesh, `[tp, *part]` if it is cut, after the transfers have ended.

    Each device gets its own part; none ever holds the whole of a parameter that is cut.
    """
    if how is None:
        return jax.block_until_ready(jax.device_put(array, NamedSharding(mesh, REPLICATED)))
    devices = list(mesh.devices.flat)
    tp, parts = len(devices), []
    for rank, device in enumerate(devices):
        part = jax.device_put(cut(array, how, rank, tp)[None], device)
        # Otherwise the host would hold copies of all parts at once.
        parts.append(jax.block_until_ready(part))
    shape = (tp, *local_shape(array.shape, how, tp))
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, SPLIT), parts)


# In a shard_map over the mesh

_peers: contextvars.ContextVar[pallas_kernels.Peers | None] = contextvars.ContextVar(
    "peers", default=None
)


@contextlib.contextmanager
def reaching(peers: pallas_kernels.Peers | None) -> Iterator[None]:
    """Lets steps that are traced inside the block exchange data through `peers`."""
    token = _peers.set(peers)
    try:
        yield
    finally:
        _peers.reset(token)


def peers() -> pallas_kernels.Peers | None:
    """Returns how the step that is being traced reaches other ranks; None: by XLA's collectives."""
    return _peers.get()


def rank() -> Int32[Array, ""]:
    """Returns the rank that the step runs on."""
    found = peers()
    return jax.lax.axis_index(AXIS) if found is None else found.number


def of_all_ranks(x: Float32[Array, ...]) -> Float32[Array, "ranks ..."]:
    """Returns the arrays of all ranks, in rank order, on every rank."""
    words = jax.lax.bitcast_convert_type(x, np.int32)
    found = pallas_kernels.exchange_words(words, axis_name=AXIS, peers=peers())
    return jax.lax.bitcast_convert_type(found, np.float32)


def of_first_rank(x: Int32[Array, ""]) -> Int32[Array, ""]:
    """Returns the number of rank 0 on every rank."""
    return pallas_kernels.exchange_words(x[None], axis_name=AXIS, peers=peers())[0, 0]
