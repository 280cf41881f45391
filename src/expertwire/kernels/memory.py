"""Memory operations of the kernels, one function each, named as in PTX. The only file with inline assembly.

    load_acquire      ld.acquire.sys          words that peers write
    exchange_release  atom.exch.release.sys   a word per peer; what the block stored before is visible first
    ticket_acq_rel    atom.add.acq_rel.gpu    counts the blocks of a launch; the last one has seen all others' stores
    clock             nanoseconds: %globaltimer
    wait              a loop of load_acquire, bounded by the clock, which leaves a record when it gives up

Why this is enough (ids of the litmus table): a block's stores, its barrier, and the ticket at gpu scope make everything
that any block stored visible to the block that draws the last ticket (P8, P9); its release at sys scope passes that on
to whoever acquires the word at sys scope (P1), also on another device (P4: both sides need sys). A word is written by
one writer only and grows, so the exchange could be a plain release store; the exchange form takes one fence for all
peers at once.

On CUDA devices `load_acquire` is a load in every thread that wants the word. Elsewhere, and in the interpreter, it is
an atomic add of zero, which one thread does for all; many waiting blocks queue up behind such adds.
"""

# mypy: ignore-errors
from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra import hip
from triton.language.target_info import is_cuda, is_hip

COUNT_BITS = tl.constexpr(24)
ALL_THREADS = tl.constexpr(1024)

# What a kernel leaves in its status words when a wait gives up, one record per peer.
STATUS_FIELDS = tl.constexpr(4)  # phase (0 = no failure), expected word, seen word, nanoseconds


@triton.jit
def load_acquire(pointers, mask):
    """int64 words at `pointers`, 0 where not `mask`. After a barrier the block sees what the writers stored before."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u64 $0, 0; @p ld.acquire.sys.global.u64 $0, [$1]; }",
            "=l,l,r", [pointers, mask.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.where(mask, tl.atomic_add(pointers, 0, mask=mask, sem="acquire", scope="sys"), 0)


def _clock_of_interpreter():
    return time.monotonic_ns()


_clock_of_interpreter.__triton_builtin__ = True  # a name that the compiler may meet in the branch it leaves out


@triton.jit
def clock():
    """Nanoseconds of a clock that also runs while other processes have the device."""
    if is_cuda():
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    elif is_hip():
        now = hip.memrealtime() * 10  # a counter of 100 MHz
    else:
        now = _clock_of_interpreter()
    return now


@triton.jit
def exchange_release(pointers, words, mask):
    """Store `words` so that who acquires them also sees every earlier store of this block."""
    tl.debug_barrier()
    tl.atomic_xchg(pointers, words, mask=mask, sem="release", scope="sys")


@triton.jit
def ticket_acq_rel(counter):
    """How many blocks of this launch have come here before. The last one sees what all blocks stored."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def pack_word(epoch, count):
    """`protocols.epoch_signal.pack`; count -1 is REFUSED."""
    return (epoch << COUNT_BITS) | (count + 1)


@triton.jit
def _agree(number):
    """The largest of what the warps of a block have."""
    return tl.max(tl.zeros([ALL_THREADS], tl.int32) + number, axis=0)


@triton.jit
def _leave_record(status, peers, mask, phase, wanted, seen, waited):
    record = status + peers * STATUS_FIELDS
    tl.store(record + 1, wanted, mask=mask)
    tl.store(record + 2, seen, mask=mask)
    tl.store(record + 3, waited, mask=mask)
    tl.store(record, tl.zeros_like(seen) + phase, mask=mask)


@triton.jit
def _failures(status, peers, mask):
    """0 if no wait of this rank has given up."""
    return tl.sum(tl.load(status + peers * STATUS_FIELDS, mask=mask, other=0, volatile=True), axis=0)


@triton.jit
def _look(pointers, mask, wanted):
    """The words at `pointers`, how many of them are late, and how many say REFUSED."""
    seen = load_acquire(pointers, mask)
    found = tl.where(seen < wanted, 1, tl.where(seen == wanted, 1 << 16, 0))
    total = tl.sum(tl.where(mask, found, 0), axis=0)
    return seen, total & 0xFFFF, total >> 16


@triton.jit
def wait(pointers, mask, epoch, phase: tl.constexpr, status, peers, timeout_us):
    """Words at `pointers` [R], once all that `mask` names have reached `epoch`; how many of them say REFUSED for it;
    and how many are late when it gives up, after `timeout_us` microseconds.

    When it gives up it writes (phase, expected word, seen word, nanoseconds) to `status` for every peer that is late.
    A launch after a failure does not wait again: the first record stays, timeout_us counts as 0. `status` is device
    memory, since reading host memory here would cost a millisecond; the word in front of it is the address of a mirror
    in host memory, 0 for none.

    Warps may give up at different times: if one has, all have, and there is a record. Should the warp that writes it
    have seen every word by then, it names all peers.
    """
    wanted = epoch << COUNT_BITS
    seen, late, refused = _look(pointers, mask, wanted)
    waited = wanted - wanted
    if late > 0:
        limit = tl.where(_failures(status, peers, mask) == 0, timeout_us, 0).to(tl.int64) * 1000
        began = clock()
        while (late > 0) & (waited < limit):  # warps may leave at different times: no barrier in here
            waited = clock() - began
            seen, late, refused = _look(pointers, mask, wanted)
    found = _agree((late << 16) + refused)
    if found >> 16 > 0:
        if _failures(status, peers, mask) == 0:
            is_late = mask & (seen < tl.where(late == 0, seen + 1, wanted))
            _leave_record(status, peers, is_late, phase, wanted, seen, waited)
            mirror = tl.load(status - STATUS_FIELDS)
            if mirror != 0:
                _leave_record(mirror.to(tl.pointer_type(tl.int64)), peers, is_late, phase, wanted, seen, waited)
    tl.debug_barrier()
    return seen, found & 0xFFFF, found >> 16
