"""Vector compares for compiled loops: 64 elements at a time become the 64 bits of one integer.

Written as portable LLVM vectors, so that the same code is AVX-512 mask instructions on one machine and SSE or NEON
on another, with the same result. Arrays are C-contiguous, one-dimensional, unsigned; bit b of a mask is element
`start + b`. Nothing checks bounds: `start + 64 <= array.size` is the caller's duty. Positions are uint64: numba looks
for negative indices wherever a signed one could be, which costs more than the rest of these loops.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
_I64 = ir.IntType(64)


def load(context, builder, kind, value, start):
    """For intrinsics: the elements of an array from index `start` on, as a vector."""
    array = context.make_array(kind)(context, builder, value)
    lane = ir.IntType(kind.dtype.bitwidth)
    vector = ir.VectorType(lane, LANES)
    at = builder.bitcast(builder.gep(array.data, [start]), vector.as_pointer())
    return builder.load(at, align=kind.dtype.bitwidth // 8)


def splat(builder, value, vector):
    """For intrinsics: a vector of type `vector` with `value` everywhere."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _fetch(builder, pointer):
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(call, [pointer, *(ir.IntType(32)(number) for number in (0, 2, 1))])


def prefetch_block(builder, data, at):
    """For intrinsics: have the elements of `data` from index `at` on, as many as `load` takes, on their way."""
    address = builder.ptrtoint(builder.gep(data, [at]), _I64)
    for line in range(data.type.pointee.width * LANES // 8 // 64):
        _fetch(builder, builder.inttoptr(builder.add(address, _I64(64 * line)), ir.IntType(8).as_pointer()))


@intrinsic
def prefetch(typingctx, array, at):
    """Have the 64 elements from `at` (uint64) on of an array on their way into the cache. They need not exist."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        prefetch_block(builder, data, arguments[1])
        return context.get_dummy_value()

    return types.void(array, types.uint64), build


@intrinsic
def prefetch_line(typingctx, array, at):
    """Have the cache line with element `at` (uint64) of an array on its way. It need not exist."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        _fetch(builder, builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array, types.uint64), build


@intrinsic
def differ(typingctx, old, new, start, field):
    """uint64 mask of the elements at `start` that differ in a bit of `field`, in two arrays of one dtype."""

    def build(context, builder, signature, arguments):
        one = load(context, builder, signature.args[0], arguments[0], arguments[2])
        two = load(context, builder, signature.args[1], arguments[1], arguments[2])
        other = builder.and_(builder.xor(one, two), splat(builder, arguments[3], one.type))
        return builder.bitcast(builder.icmp_unsigned("!=", other, ir.Constant(one.type, [0] * LANES)), _I64)

    return types.uint64(old, new, types.uint64, old.dtype), build


@intrinsic
def popcount(typingctx, mask):
    """Number of ones, int64."""

    def build(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), build


@intrinsic
def lowest(typingctx, mask):
    """Index of the lowest one, uint64; 64 for 0."""

    def build(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


def _nth_by_halves(builder, mask, rank):
    """Position of a one by binary search over popcounts; no branches, because ranks are random."""
    shift = _I64(0)
    for size in (32, 16, 8, 4, 2, 1):
        low = builder.and_(builder.lshr(mask, shift), _I64((1 << size) - 1))
        below = builder.ctpop(low)
        beyond = builder.icmp_unsigned(">=", rank, below)
        rank = builder.select(beyond, builder.sub(rank, below), rank)
        shift = builder.select(beyond, builder.add(shift, _I64(size)), shift)
    return shift


_DEPOSITS = bool(get_host_cpu_features().get("bmi2"))  # numba compiles for this very machine, its cache knows which


@intrinsic
def at_least(typingctx, array, start, threshold):
    """uint64 mask of those of the 64 elements from `start` on that are at least `threshold`."""

    def build(context, builder, signature, arguments):
        vector = load(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.bitcast(builder.icmp_unsigned(">=", vector, splat(builder, arguments[2], vector.type)), _I64)

    return types.uint64(array, types.uint64, array.dtype), build


@intrinsic
def nth_one(typingctx, mask, rank):
    """Index, uint64, of the one with `rank` ones below it; `mask` has more than `rank`."""

    def build(context, builder, signature, arguments):
        mask, rank = arguments
        if not _DEPOSITS:
            return _nth_by_halves(builder, mask, rank)
        kind = ir.FunctionType(_I64, [_I64, _I64])
        deposit = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
        one = builder.call(deposit, [builder.shl(_I64(1), rank), mask])
        return builder.cttz(one, ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64, types.uint64), build


@intrinsic
def read_word(typingctx, array, at):
    """The 8 bytes of a uint8 array from index `at` on, aligned or not: uint64, little-endian."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), _I64.as_pointer()), align=1)

    return types.uint64(array, types.uint64), build


@intrinsic
def highest(typingctx, mask):
    """Index of the highest one, int64; -1 for 0."""

    def build(context, builder, signature, arguments):
        return builder.sub(_I64(63), builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0)))

    return types.int64(types.uint64), build
