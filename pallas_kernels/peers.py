"""How the ranks of a mesh reach one another's memory: one buffer a rank, and its layout.

Kernels that exchange data write into the buffers of their peers. The buffer holds two mailboxes,
one for rows of activations and one for chunks of words. A mailbox has slots; a message that each
rank sends to all goes through one slot of each:

    inbox   [2, ranks, slots, slot_bytes]  the message of each rank, by the parity of the epoch
    flags   [ranks, slots] int32           the last epoch that each rank has released
    epochs  [slots] int32                  the last epoch that this rank has read

A rank that has read the messages of an epoch knows that all ranks have sent theirs, and so have
read those of the epoch before: two inboxes suffice, and nothing is ever zeroed. Epochs wrap around
every few days, so they are compared by their difference.

Kernels that use one mailbox must run one after another, in the same order on all ranks. That holds
as long as XLA runs the kernels of a program in the order of its schedule, which is the same for all
ranks (its command buffers do so unless they are told to run what is independent at the same time).

XLA does not know of these writes: addresses are data. Whoever creates the buffers keeps them for
as long as a program runs that got their addresses.
"""

import dataclasses

import jax
from jaxtyping import Array, Int32

NO_BUFFERS = "the ranks have no buffers in one another's memory"
CHUNK_WORDS = 512  # of a slot of the mailbox of words: 128 threads with 16 bytes each
_WORD = 4  # bytes
_ALIGN = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """Where things are in a buffer, in bytes; `first` is where the mailbox begins."""

    first: int
    ranks: int
    slots: int
    slot_bytes: int

    @property
    def inbox_bytes(self) -> int:
        """Bytes of the messages of all ranks for one parity."""
        return self.ranks * self.slots * self.slot_bytes

    @property
    def flags(self) -> int:
        return self.first + 2 * self.inbox_bytes

    @property
    def epochs(self) -> int:
        return self.flags + self.ranks * self.slots * _WORD

    @property
    def end(self) -> int:
        return self.epochs + self.slots * _WORD


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What a kernel needs to reach the buffers of all ranks; used inside a `shard_map`.

    `rank` is this rank's number on the axis `axis_name`. `addresses` has the low and the high half
    of the address of each rank's buffer, and is the same on all. `rows` and `row_bytes` are those
    of the mailbox of rows, `chunks` the slots of that of words.
    """

    rank: Int32[Array, "1"]
    addresses: Int32[Array, "ranks 2"]
    axis_name: str = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})
    row_bytes: int = dataclasses.field(metadata={"static": True})
    chunks: int = dataclasses.field(metadata={"static": True})

    @property
    def number(self) -> Int32[Array, ""]:
        """This rank's number, as `jax.lax.axis_index` gives it."""
        return self.rank[0]

    @property
    def num_ranks(self) -> int:
        return self.addresses.shape[0]

    @property
    def row_mailbox(self) -> Mailbox:
        return self._mailboxes[0]

    @property
    def word_mailbox(self) -> Mailbox:
        return self._mailboxes[1]

    @property
    def _mailboxes(self) -> tuple[Mailbox, Mailbox]:
        return _mailboxes(self.num_ranks, self.rows, self.row_bytes, self.chunks)


def buffer_words(*, ranks: int, rows: int, row_bytes: int, chunks: int) -> int:
    """Returns how many int32 the buffer of a rank has; all must be 0 before the first message.

    Raises ValueError if a kernel could not address it.
    """
    _, last = _mailboxes(ranks, rows, row_bytes, chunks)
    if last.end >= 2**32:  # kernels compute places in it with 32 bits
        raise ValueError(f"a buffer of {last.end} bytes for {ranks=}, {rows=} of {row_bytes} bytes")
    return -(-last.end // _WORD)


def _mailboxes(ranks: int, rows: int, row_bytes: int, chunks: int) -> tuple[Mailbox, Mailbox]:
    """Returns the mailbox of rows and that of words, which begins where the first one ends."""
    of_rows = Mailbox(first=0, ranks=ranks, slots=rows, slot_bytes=row_bytes)
    first = -(-of_rows.end // _ALIGN) * _ALIGN
    return of_rows, Mailbox(first=first, ranks=ranks, slots=chunks, slot_bytes=CHUNK_WORDS * _WORD)
