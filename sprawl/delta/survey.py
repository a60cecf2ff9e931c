"""Which elements are of which class, 64 elements and eight classes at a time: all of a state goes through this loop.

The class of an element follows from its key (`sprawl.delta.bits`). The keys of a block of 64 elements become eight
masks, a class each. On x86 with AVX-512 VBMI and GFNI that is a table look-up to one-hot bytes, a
transposition of 8 x 8 bit matrices and one of bytes; elsewhere it is nine vector compares, with the same result.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sprawl.delta.simd import LANES, load, prefetch_block, splat

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_BYTES = ir.VectorType(_I8, LANES)
_WORDS = ir.VectorType(_I64, 8)
_ZEROS = ir.Constant(_WORDS, [0] * 8)
_NEEDED = ("avx512f", "avx512bw", "avx512vbmi", "gfni")
_HOST = get_host_cpu_features()
FAST = all(_HOST.get(feature) for feature in _NEEDED)  # numba compiles for this very machine, its cache knows which
BLOCKS = 64  # of a tile: what is surveyed at a time
REACH = 63  # keys from the first one of a window that are told apart


_PLAIN = list(range(LANES))
_TURNED = [at ^ 7 for at in _PLAIN]  # every eight bytes backwards


def _shuffled(builder, vector, order):
    places = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)


def _relative(builder, vector, shift, mask, low, order):
    """Keys less `low`, at most `REACH`: <64 x i8>. Keys of 64-bit elements have up to 11 bits, others at most 8."""
    lane = vector.type.element
    wide = lane.width == 64
    keys = builder.lshr(vector, splat(builder, shift if wide else builder.trunc(shift, lane), vector.type))
    if lane.width == 16:  # narrowed and brought into order at once
        keys = _shuffled(builder, builder.bitcast(keys, ir.VectorType(_I8, 2 * LANES)), [2 * at for at in order])
    elif not wide:
        keys = _shuffled(builder, builder.trunc(keys, _BYTES) if lane.width == 32 else keys, order)
    low, mask = (number if wide else builder.trunc(number, _I8) for number in (low, mask))
    keys = builder.sub(builder.and_(keys, splat(builder, mask, keys.type)), splat(builder, low, keys.type))
    most = ir.Constant(keys.type, [REACH] * LANES)
    keys = builder.select(builder.icmp_unsigned("<", keys, most), keys, most)
    return _shuffled(builder, builder.trunc(keys, _BYTES), order) if wide else keys


def _masks_by_table(builder, keys, hot, edges):
    """The masks, and the mask of what is in none of them.

    One-hot bytes by look-up in `hot`, then bit b of byte k of eight bytes becomes bit k of byte b, and so on.
    """
    table = builder.load(builder.bitcast(hot, _BYTES.as_pointer()), align=1)
    look_up = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_BYTES, [_BYTES, _BYTES]), "llvm.x86.avx512.permvar.qi.512"
    )
    found = builder.call(look_up, [table, keys])
    affine = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_BYTES, [_BYTES, _BYTES, _I8]), "llvm.x86.vgf2p8affineqb.512"
    )
    ones = ir.Constant(_BYTES, [1 << (at % 8) for at in range(LANES)])
    turned = builder.call(affine, [ones, found, _I8(0)])  # this transposition turns eight bytes around
    masks = builder.bitcast(_shuffled(builder, turned, [at % 8 * 8 + at // 8 for at in range(LANES)]), _WORDS)
    nothing = builder.icmp_unsigned("==", _shuffled(builder, found, _TURNED), ir.Constant(_BYTES, [0] * LANES))
    return masks, builder.bitcast(nothing, _I64)


def _masks_by_compares(builder, keys, hot, edges):
    """The same: class k is what reaches edge k and not edge k + 1."""
    reached = []
    for k in range(9):
        edge = builder.load(builder.gep(edges, [_I64(k)]))
        reached.append(builder.bitcast(builder.icmp_unsigned(">=", keys, splat(builder, edge, _BYTES)), _I64))
    masks = ir.Constant(_WORDS, ir.Undefined)
    for k in range(8):
        masks = builder.insert_element(masks, builder.xor(reached[k], reached[k + 1]), ir.IntType(32)(k))
    return masks, builder.not_(builder.xor(reached[0], reached[8]))


def _transposed(builder, rows):
    """Eight rows of eight words, transposed: three rounds of interleaving each row with the one four further on."""
    for _ in range(3):
        mixed = []
        for one, two in zip(rows[:4], rows[4:], strict=True):
            for half in (0, 4):
                order = [place for at in range(half, half + 4) for place in (at, at + 8)]
                places = ir.Constant(ir.VectorType(ir.IntType(32), 8), order)
                mixed.append(builder.shuffle_vector(one, two, places))
        rows = mixed
    return rows


def _vectors(builder, array, at):
    """Pointer to the eight words of an array from word `at` on."""
    words = builder.bitcast(array, _I64.as_pointer())
    return builder.bitcast(builder.gep(words, [at]), _WORDS.as_pointer())


class _Eight:
    """Code for eight of the classes: `block` for each of 64 blocks, then `finish`."""

    def __init__(self, builder, number, eights, tables):
        self._builder, self._number, self._eights = builder, number, eights
        self._members, self._before, self._totals = tables
        self._counts = cgutils.alloca_once_value(builder, _ZEROS)
        builder.store(_ZEROS, self._counts)
        self._packed = cgutils.alloca_once(builder, _WORDS, size=BLOCKS // 4)
        self._row = _ZEROS

    def block(self, block, quarter, masks):
        """Keep the masks of `block`, which is number `quarter` of four whose counts share words."""
        builder = self._builder
        count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_WORDS, [_WORDS]), "llvm.ctpop.v8i64")
        place = builder.add(builder.mul(block, _I64(8 * self._eights)), _I64(8 * self._number))
        builder.store(masks, _vectors(builder, self._members, place), align=8)
        now = builder.load(self._counts)
        shifted = builder.shl(now, ir.Constant(_WORDS, [16 * quarter] * 8))
        self._row = builder.or_(self._row, shifted) if quarter else shifted
        builder.store(builder.add(now, builder.call(count, [masks])), self._counts)
        if quarter == 3:
            builder.store(self._row, builder.gep(self._packed, [builder.udiv(block, _I64(4))]))

    def finish(self):
        builder = self._builder
        for half in range(2):
            rows = [builder.load(builder.gep(self._packed, [_I64(8 * half + at)])) for at in range(8)]
            for k, row in enumerate(_transposed(builder, rows)):
                place = _I64((8 * self._number + k) * (BLOCKS // 4) + 8 * half)
                builder.store(row, _vectors(builder, self._before, place), align=8)
        builder.store(builder.load(self._counts), _vectors(builder, self._totals, _I64(8 * self._number)), align=8)


def _loop(masks_of, order, eights):
    """What the intrinsics below compile to."""

    def build(context, builder, signature, arguments):
        arrays = [
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else None
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        start, shift, mask, low = arguments[1:5]
        hot, edges, *tables, outside = arrays[5:]
        parts = [_Eight(builder, number, eights, tables) for number in range(eights)]
        with cgutils.for_range(builder, _I64(BLOCKS // 4)) as loop:
            for quarter in range(4):
                block = builder.add(builder.mul(loop.index, _I64(4)), _I64(quarter))
                at = builder.add(start, builder.mul(block, _I64(LANES)))
                vector = load(context, builder, signature.args[0], arguments[0], at)
                prefetch_block(builder, arrays[0], builder.add(at, _I64(BLOCKS * LANES)))
                keys = _relative(builder, vector, shift, mask, low, order)
                none = _I64(2**64 - 1)
                for number, part in enumerate(parts):
                    ours = builder.gep(hot, [_I64(number * (REACH + 1))]), builder.gep(edges, [_I64(number * 9)])
                    masks, others = masks_of(builder, keys, *ours)
                    none = builder.and_(none, others)
                    part.block(block, quarter, masks)
                builder.store(none, builder.gep(outside, [block]))
        for part in parts:
            part.finish()
        return context.get_dummy_value()

    return build


def _signature(array, *tables):
    word = types.uint64
    return types.void(array, word, word, word, word, *tables)


def survey_of(eights, fast):
    """An intrinsic for windows of `eights` times eight classes; `fast` only where `FAST`.

        survey(array, start, shift, mask, low, hot, edges, members, before, totals, outside)

    It goes through 64 blocks of 64 elements of `array` (unsigned) from `start` on. An element's relative key is
    `min((element >> shift & mask) - low, 63)`, modulo the width of the element. Class k of an eight holds the relative
    keys from `edges[k]` to below `edges[k + 1]` (uint8 [eights, 9]); `hot` uint8 [eights, 64] says the same of every
    relative key, with bit k set. `members` uint64 [64, 8 eights] gets the masks of each block, `before` uint16
    [8 eights, 64] the numbers of members in earlier blocks, and `outside` uint64 [64] the masks of elements in no
    class; `totals` int64 [8 eights] gets the numbers of all members.
    """
    build = _loop(_masks_by_table, _TURNED, eights) if fast else _loop(_masks_by_compares, _PLAIN, eights)

    @intrinsic
    def survey(typingctx, array, start, shift, mask, low, hot, edges, members, before, totals, outside):
        return _signature(array, hot, edges, members, before, totals, outside), build

    return survey


survey_8, survey_16 = survey_of(1, FAST), survey_of(2, FAST)
