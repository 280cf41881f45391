"""Memory operations on raw addresses, for use inside numba kernels.

Words are published with a release store and read with an acquire load: everything that a rank wrote before the store is
there for whoever saw the word. On a wait, a few spins, then `sched_yield`, then short sleeps: with more ranks than
cores a spinning rank would keep the one it waits for from running.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
from __future__ import annotations

import platform

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from expertwire.host.cache import KEEP

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_BYTE_PTR = ir.IntType(8).as_pointer()
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def _pointer(builder, address, bits):
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@intrinsic
def load_acquire(typingctx, address):
    """ld.acquire of the int64 at `address`."""

    def codegen(context, builder, signature, args):
        load = builder.load_atomic(_pointer(builder, args[0], 64), "acquire", 8)
        load.volatile = True
        return load

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """st.release of an int64 to `address`."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0], 64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def copy_bytes(typingctx, destination, source, num_bytes):
    """memcpy between two addresses."""

    def codegen(context, builder, signature, args):
        pointers = [builder.inttoptr(a, _BYTE_PTR) for a in args[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _stream_line(typingctx, destination, source):
    """Copy 64 bytes past the caches; `destination` is 64-byte aligned."""

    def codegen(context, builder, signature, args):
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line), align=1)
        store = builder.store(value, builder.inttoptr(args[0], line), align=64)
        one = ir.Constant(ir.IntType(32), 1)
        store.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_fence(typingctx):
    """sfence: stores past the caches are not ordered by a release store, so they need a fence before it."""

    def codegen(context, builder, signature, args):
        if _IS_X86:
            fence = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"
            )
            builder.call(fence, [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True, inline="always")
def stream_bytes(destination, source, num_bytes):
    """memcpy past the caches, for rows that nobody reads soon. End with `store_fence` before a release store."""
    whole = num_bytes & ~63 if _IS_X86 and destination & 63 == 0 else 0
    for at in range(0, whole, 64):
        _stream_line(destination + at, source + at)
    copy_bytes(destination + whole, source + whole, num_bytes - whole)


@intrinsic
def _cpu_pause(typingctx):
    def codegen(context, builder, signature, args):
        if _IS_X86:
            pause = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _void_pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], _BYTE_PTR)

    return types.voidptr(types.int64), codegen


@intrinsic
def float_bits(typingctx, value):
    """The bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, bits):
    """The float32 with these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@njit(nogil=True, inline="always")
def view(address, count, dtype):
    """A one-dimensional array over `count` elements at `address`."""
    return carray(_void_pointer(address), (count,), dtype)


@njit(nogil=True, cache=KEEP)
def wait_word(address, word, spins, yields, naps):
    """Wait until the word at `address` is >= `word` or patience runs out; returns the last value seen (acquire).

    Patience is `spins` pauses, then `yields` calls of sched_yield, then `naps` sleeps of 50 us. The caller looks
    around (time-out, dead peers, Ctrl-C) and calls again.
    """
    for i in range(spins + yields + naps):
        seen = load_acquire(address)
        if seen >= word:
            return seen
        if i < spins:
            _cpu_pause()
        elif i < spins + yields:
            _sched_yield()
        else:
            _usleep(types.uint32(50))
    return load_acquire(address)


@njit(cache=KEEP)
def publish(address, word):
    store_release(address, word)


@njit(cache=KEEP)
def read_word(address):
    return load_acquire(address)
