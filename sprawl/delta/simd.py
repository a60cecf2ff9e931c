"""Vector compares for compiled loops: 64 elements at a time become the 64 bits of one integer.

Written as portable LLVM vectors, so that the same code is AVX-512 mask instructions on one machine and SSE or NEON
on another, with the same result. Arrays are C-contiguous, one-dimensional, unsigned; bit b of a mask is element
`start + b`. Nothing checks bounds: `start + 64 <= array.size` is the caller's duty. Positions are uint64: numba looks
for negative indices wherever a signed one could be, which costs more than the rest of these loops.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64
_I64 = ir.IntType(64)


def _load(context, builder, kind, value, start):
    array = context.make_array(kind)(context, builder, value)
    lane = ir.IntType(kind.dtype.bitwidth)
    vector = ir.VectorType(lane, LANES)
    at = builder.bitcast(builder.gep(array.data, [start]), vector.as_pointer())
    return builder.load(at, align=kind.dtype.bitwidth // 8)


def _splat(builder, value, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _masked(context, builder, signature, arguments):
    vector = _load(context, builder, signature.args[0], arguments[0], arguments[1])
    return builder.and_(vector, _splat(builder, arguments[2], vector.type))


def _at_least(builder, vector, threshold):
    return builder.bitcast(builder.icmp_unsigned(">=", vector, _splat(builder, threshold, vector.type)), _I64)


@intrinsic
def differ(typingctx, old, new, start, field):
    """uint64 mask of the elements at `start` that differ in a bit of `field`, in two arrays of one dtype."""

    def build(context, builder, signature, arguments):
        one = _load(context, builder, signature.args[0], arguments[0], arguments[2])
        two = _load(context, builder, signature.args[1], arguments[1], arguments[2])
        other = builder.and_(builder.xor(one, two), _splat(builder, arguments[3], one.type))
        return builder.bitcast(builder.icmp_unsigned("!=", other, ir.Constant(one.type, [0] * LANES)), _I64)

    return types.uint64(old, new, types.uint64, old.dtype), build


@intrinsic
def reach(typingctx, array, start, keep, threshold):
    """uint64 mask of the elements at `start` with `element & keep >= threshold`, unsigned."""

    def build(context, builder, signature, arguments):
        masked = _masked(context, builder, signature, arguments)
        return _at_least(builder, masked, arguments[3])

    return types.uint64(array, types.uint64, array.dtype, array.dtype), build


@intrinsic
def reach_four(typingctx, array, start, keep, first, second, third, fourth):
    """`reach` for four thresholds, with the elements loaded once: a tuple of masks."""

    def build(context, builder, signature, arguments):
        masked = _masked(context, builder, signature, arguments)
        masks = [_at_least(builder, masked, threshold) for threshold in arguments[3:]]
        return context.make_tuple(builder, signature.return_type, masks)

    of = array.dtype
    return types.UniTuple(types.uint64, 4)(array, types.uint64, of, of, of, of, of), build


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


@intrinsic
def highest(typingctx, mask):
    """Index of the highest one, int64; -1 for 0."""

    def build(context, builder, signature, arguments):
        return builder.sub(_I64(63), builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0)))

    return types.int64(types.uint64), build
