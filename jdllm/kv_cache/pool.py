"""The paged KV pool on the device: one array per layer, donated to every launch.

The layout of an array is `[P, 2, K, Z, H]` (pages, K or V, KV heads, tokens of a page, head
dim), so that a kernel can read K or V of one page and head as one contiguous box. There is one
array per layer, because XLA would copy a stacked pool slice by slice.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm import errors
from jdllm.spec import KVHeads, ModelSpec

CPU_POOL_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Shape of the pool: `num_pages` pages of `page_size` tokens in each layer.

    Every layer has `num_kv_heads` of `head_dim`, unless `kv_heads_of_layers` says otherwise; they
    are those of one device. With a `mesh` of one axis, an array has a leading axis of its devices,
    and each device has its own heads of every page.
    """

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    mesh: jax.sharding.Mesh | None = None
    kv_heads_of_layers: tuple[KVHeads, ...] = ()

    @property
    def layer_shapes(self) -> list[tuple[int, int, int, int, int]]:
        same = KVHeads(count=self.num_kv_heads, dim=self.head_dim)
        return [
            (self.num_pages, 2, heads.count, self.page_size, heads.dim)
            for heads in self.kv_heads_of_layers or (same,) * self.num_layers
        ]


def create(config: PoolConfig) -> list[Float[Array, "*devices P 2 K Z H"]]:
    """Returns an array of zeros for each layer; not garbage, since padding must never hold NaN."""
    lead, place, mesh = (), None, config.mesh
    if mesh is not None:
        lead = (mesh.devices.size,)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*mesh.axis_names))
    return [jnp.zeros((*lead, *one), config.dtype, device=place) for one in config.layer_shapes]


def choose_page_size(block_size: int, wanted: int | None) -> int:
    """Returns the wanted page size, by default 64 or the block size if 64 does not suit.

    A page size must divide the block size or be a multiple of it.
    """
    page_size = wanted or max(64, block_size)
    if wanted is None and page_size % block_size and block_size % page_size:
        page_size = block_size
    if page_size % block_size and block_size % page_size:
        divisors = [d for d in range(1, block_size + 1) if block_size % d == 0]
        raise errors.ConfigError(
            f"{page_size=} and {block_size=} must divide one another; use a multiple of "
            f"{block_size} or one of {', '.join(map(str, divisors))}"
        )
    return page_size


def pages_of_total(max_total_tokens: int, page_size: int) -> int:
    """Returns how many whole pages `max_total_tokens` fill, at least one."""
    if max_total_tokens < page_size:
        raise errors.ConfigError(f"{max_total_tokens=} is less than one page of {page_size}")
    return max_total_tokens // page_size


def choose_num_pages(
    spec: ModelSpec,
    *,
    page_size: int,
    dtype: str,
    context_length: int,
    max_running_requests: int,
    max_total_tokens: int | None,
    free_bytes: int | None,
) -> int:
    """Returns how many pages to allocate.

    `free_bytes` is what an accelerator has left for KV. It is None on CPU, where the pool holds
    `max_running_requests` contexts, but at most 1 GB. On an accelerator the pool takes all free
    memory: the prefix cache uses the pages that running rows do not.
    """
    page_bytes = spec.kv_bytes_per_token(jnp.dtype(dtype).itemsize) * page_size
    if max_total_tokens is not None:
        pages = pages_of_total(max_total_tokens, page_size)
        if free_bytes is not None and pages * page_bytes > free_bytes:
            raise errors.ConfigError(
                f"{max_total_tokens=} needs {pages * page_bytes / 1e9:.2f} GB of KV, "
                f"{free_bytes / 1e9:.2f} GB are free; lower it or raise mem_fraction_static"
            )
        return pages
    if free_bytes is None:
        wanted = max_running_requests * -(-context_length // page_size)
        return max(1, min(wanted, CPU_POOL_BYTES // page_bytes))
    pages = free_bytes // page_bytes
    if pages < 1:
        raise errors.ConfigError(
            f"no memory left for KV: {free_bytes / 1e9:.2f} GB free after weights, a page "
            f"needs {page_bytes / 1e6:.2f} MB; raise mem_fraction_static"
        )
    return int(pages)
