"""Code of one CUDA thread that exchanges messages with other GPUs (`pallas_kernels/peers.py`).

A CTA sends one message through one slot of a mailbox. Its threads write their words into the
inboxes of all ranks, its own among them, past the caches of a GPU. After a barrier the thread p
releases the epoch at rank p, and waits until rank p has released it here: a fence of the whole
system on one side and an acquire on the other make the words visible before the flag. After another
barrier all threads read the words of all ranks.

Loops of one launch run in the same order on all ranks, and the CTAs of a launch begin in order. So
a CTA waits only for CTAs that can run, also where a grid is larger than the GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper import lane_code
from pallas_kernels.hopper.lane_code import Float, Int
from pallas_kernels.peers import Mailbox

# How long a rank waits for a message. Ranks differ by the time that launches take to begin: a rank
# whose peer has waited so long will get no answer, since the peer's launch has failed.
WAIT_S = 20

_REGISTERS = ".reg .b64 at, by, begin, now; .reg .b32 v; .reg .pred p; "
_AT = _REGISTERS + "mov.b64 at, {$LOW, $HIGH}; cvt.u64.u32 by, $BY; add.u64 at, at, by; "


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Address:
    """A place in the memory of some GPU, in two halves."""

    low: Int
    high: Int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One message of each rank to all, through `slot`; the threads of a CTA call it together.

    `addresses` are those of the ranks' buffers. Words are those of a thread: `pieces` of 2 or 4,
    each of which is one store, 128 threads side by side.
    """

    mailbox: Mailbox
    addresses: Sequence[Address]
    rank: Int
    slot: Int
    threads: int = 128

    def all_to_all(self, pieces: Sequence[Sequence[Int]]) -> list[list[list[Int]]]:
        """Returns the pieces of every rank, in rank order."""
        epoch, own = self._begin()
        for address in self.addresses:
            self._write(address, epoch, self.rank, pieces)
        lane_code.sync_cta()
        self._release(epoch)
        self._wait(own, epoch)
        lane_code.sync_cta()
        sizes = [len(piece) for piece in pieces]
        found = [self._read(own, epoch, rank, sizes) for rank in self._ranks]
        self._end(own, epoch)
        return found

    def reduce(
        self,
        pieces: Sequence[Sequence[Int]],
        combine: Callable[[list[list[list[Int]]]], list[list[Int]]],
        *,
        two_shot: bool,
    ) -> list[list[Int]]:
        """Returns `combine` of the pieces of every rank.

        With `two_shot`, rank `slot % ranks` alone combines and sends the result to the others:
        each rank sends its words once and not to every other rank, but the others wait twice.
        """
        if not two_shot:
            return combine(self.all_to_all(pieces))
        epoch, own = self._begin()
        owner = self.slot % self.mailbox.ranks
        is_owner = owner.equals(self.rank)
        sizes = [len(piece) for piece in pieces]
        at_owner = self._address_of(owner)
        self._write(at_owner, epoch, self.rank, pieces)
        lane_code.sync_cta()
        with lane_code.when(lane_code.thread().equals(0)):
            self._release_at(at_owner, epoch)
        with lane_code.when(is_owner):
            self._wait(own, epoch)
        lane_code.sync_cta()  # all threads: a barrier is for a whole CTA
        with lane_code.when(is_owner):
            total = combine([self._read(own, epoch, rank, sizes) for rank in self._ranks])
            for address in self.addresses:
                self._write(address, epoch, self.rank, total)
        lane_code.sync_cta()
        with lane_code.when(is_owner):
            self._release(epoch)
        with lane_code.when(lane_code.thread().equals(0)):
            wait_for(own, self._flag(owner), epoch)
        lane_code.sync_cta()
        found = self._read(own, epoch, owner, sizes)
        self._end(own, epoch)
        return found

    @property
    def _ranks(self) -> range:
        return range(self.mailbox.ranks)

    def _begin(self) -> tuple[Int, Address]:
        own = self._address_of(self.rank)
        return _load_epoch(own, self._epoch) + 1, own

    def _end(self, own: Address, epoch: Int) -> None:
        with lane_code.when(lane_code.thread().equals(0)):
            _store_epoch(own, self._epoch, epoch)

    def _address_of(self, rank: Int) -> Address:
        low, high = self.addresses[0].low, self.addresses[0].high
        for number, address in enumerate(self.addresses[1:], start=1):
            is_it = rank.equals(number)
            low = lane_code.select(is_it, address.low, low)
            high = lane_code.select(is_it, address.high, high)
        return Address(low, high)

    @property
    def _epoch(self) -> Int:
        return self.slot * 4 + self.mailbox.epochs

    def _flag(self, rank: Int | int) -> Int:
        return self._index(rank) * 4 + self.mailbox.flags

    def _index(self, rank: Int | int) -> Int:
        """Returns the number of a rank's message among those of all."""
        if isinstance(rank, int):
            return self.slot + rank * self.mailbox.slots
        return rank * self.mailbox.slots + self.slot

    def _place(self, epoch: Int, rank: Int | int) -> Int:
        """Returns where a rank's message begins for this thread, whose pieces are of one size."""
        inbox = (epoch & 1) * self.mailbox.inbox_bytes + self.mailbox.first
        return inbox + self._index(rank) * self.mailbox.slot_bytes

    def _offsets(self, sizes: Sequence[int]) -> list[Int]:
        """Returns where each piece is in the message, in bytes."""
        starts = [4 * self.threads * sum(sizes[:number]) for number in range(len(sizes))]
        return [
            lane_code.thread() * (4 * size) + start
            for size, start in zip(sizes, starts, strict=True)
        ]

    def _write(
        self, address: Address, epoch: Int, rank: Int, pieces: Sequence[Sequence[Int]]
    ) -> None:
        place = self._place(epoch, rank)
        offsets = self._offsets([len(piece) for piece in pieces])
        for piece, offset in zip(pieces, offsets, strict=True):
            store_words(address, place + offset, piece)

    def _read(
        self, own: Address, epoch: Int, rank: Int | int, sizes: Sequence[int]
    ) -> list[list[Int]]:
        place = self._place(epoch, rank)
        return [
            load_words(own, place + offset, size)
            for size, offset in zip(sizes, self._offsets(sizes), strict=True)
        ]

    def _release(self, epoch: Int) -> None:
        for rank, address in enumerate(self.addresses):
            with lane_code.when(lane_code.thread().equals(rank)):
                self._release_at(address, epoch)

    def _release_at(self, address: Address, epoch: Int) -> None:
        release(address, self._flag(self.rank), epoch)

    def _wait(self, own: Address, epoch: Int) -> None:
        for rank in self._ranks:
            with lane_code.when(lane_code.thread().equals(rank)):
                wait_for(own, self._flag(rank), epoch)


def address_of(addresses: ir.Value, rank: int) -> Address:
    """Returns an address from an int32 array [ranks, 2] in global memory, flat."""
    index = lane_code.constant(2 * rank)
    return Address(lane_code.load(addresses, index), lane_code.load(addresses, index + 1))


def store_words(address: Address, offset: Int, words: Sequence[Int]) -> None:
    """Stores 2 or 4 words; other GPUs see them after a `release`."""
    names = ", ".join(f"${number}" for number in range(3, 3 + len(words)))
    ptx = _block(0, f"st.relaxed.sys.global.v{len(words)}.b32 [at], {{{names}}};")
    _run(ptx, ",".join(["r"] * (3 + len(words))), address.low, address.high, offset, *words)


def load_words(address: Address, offset: Int, count: int) -> list[Int]:
    """Returns 2 or 4 words as they now are in memory."""
    i32 = ir.IntegerType.get_signless(32)
    names = ", ".join(f"${number}" for number in range(count))
    ptx = _block(count, f"ld.relaxed.sys.global.v{count}.b32 {{{names}}}, [at];")
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    constraints = ",".join(["=r"] * count + ["r"] * 3 + ["~{memory}"])
    found = _run(ptx, constraints, address.low, address.high, offset, result=struct)
    return [Int(llvm.extractvalue(i32, found, [number])) for number in range(count)]


def release(address: Address, offset: Int, epoch: Int) -> None:
    """Stores a flag after everything that the CTA has written before its last barrier."""
    ptx = _block(0, "fence.acq_rel.sys; st.release.sys.global.b32 [at], $3;")
    _run(ptx, "r,r,r,r,~{memory}", address.low, address.high, offset, epoch)


def wait_for(address: Address, offset: Int, epoch: Int) -> None:
    """Waits until a flag has reached an epoch; ends the launch with an error after `WAIT_S`."""
    ptx = _block(
        0,
        "mov.u64 begin, %globaltimer; "
        # By the difference, since epochs wrap around.
        "AGAIN: ld.acquire.sys.global.b32 v, [at]; sub.s32 v, v, $3; "
        "setp.ge.s32 p, v, 0; @p bra DONE; "
        "mov.u64 now, %globaltimer; sub.u64 now, now, begin; "
        f"setp.lt.u64 p, now, {WAIT_S}000000000; @p bra AGAIN; trap; DONE:",
    )
    _run(ptx, "r,r,r,r,~{memory}", address.low, address.high, offset, epoch)


def low_float(word: Int) -> Float:
    """Returns the bfloat16 in the lower half of a word."""
    return _float_of(word << 16)


def high_float(word: Int) -> Float:
    """Returns the bfloat16 in the upper half of a word."""
    return _float_of(word & 0xFFFF0000)


def bfloat16_pair(low: Float, high: Float) -> Int:
    """Returns a word of two bfloat16, each rounded to nearest."""
    i32 = ir.IntegerType.get_signless(32)
    ptx = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    packed: Any = llvm.inline_asm(i32, [high.value, low.value], ptx, "=r,f,f")
    return Int(packed)


def _float_of(bits: Int) -> Float:
    return Float(arith.bitcast(ir.F32Type.get(), bits.value))


def _load_epoch(address: Address, offset: Int) -> Int:
    ptx = _block(1, "ld.relaxed.gpu.global.b32 $0, [at];")
    i32 = ir.IntegerType.get_signless(32)
    return Int(_run(ptx, "=r,r,r,r", address.low, address.high, offset, result=i32))


def _store_epoch(address: Address, offset: Int, epoch: Int) -> None:
    ptx = _block(0, "st.relaxed.gpu.global.b32 [at], $3;")
    _run(ptx, "r,r,r,r,~{memory}", address.low, address.high, offset, epoch)


def _block(first: int, ptx: str) -> str:
    """Returns PTX that runs with `at`, an address and an offset: the operands from `$first` on."""
    at = _AT.replace("$LOW", f"${first}").replace("$HIGH", f"${first + 1}")
    # Braces make the registers and labels those of this piece of code.
    return "{ " + at.replace("$BY", f"${first + 2}") + ptx + " }"


def _run(ptx: str, constraints: str, *operands: Int, result: ir.Type | None = None) -> Any:
    kind = ir.Type.parse("!llvm.void") if result is None else result
    values = [operand.value for operand in operands]
    return llvm.inline_asm(kind, values, ptx, constraints, has_side_effects=True)
