"""Matrix products inside compiled loops, on one core, with a matrix W (m, columns) as it lies: one that is trained is
another one in every step, and to pack it (products.py) takes about as long as a product with some ten rows.

    y += x W       numbers of x times registers of columns of W
    y = x Wᵀ       numbers of W times registers of rows of x, which is given transposed: xᵀ (columns, n)

In the second the sums of SIDE rows of W are transposed in registers before they are written.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from allforce.loops import njit
from allforce.models.products import DEPTH, I32, I64, ROWS, VECTOR, WIDE, Registers, loop, sum_of_products

FEWER = max(4, ROWS // 2)  # rows of x where there are no more
LINE, AHEAD = 64, 8  # bytes of a line of the cache; rows of W that are fetched before they are needed
ANY = ir.IntType(8).as_pointer()
MOST = 3 if VECTOR == 64 else 1  # registers of rows of x whose products with SIDE rows of W are summed together


def side(size: int) -> int:
    """Rows of W that are transposed together, for numbers of so many bytes."""
    return min(8, VECTOR // size)


def fetch(builder, pointer) -> None:
    """Let the cache have the line of a number that will be needed; nothing happens where there is no memory."""
    kind = ir.FunctionType(ir.VoidType(), [ANY, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(pointer, ANY), I32(0), I32(3), I32(1)])


class Lanes(Registers):
    """Registers of another length."""

    def __init__(self, builder, pointer, size: int, count: int):
        super().__init__(builder, pointer, size)
        self.count, self.vector = count, ir.VectorType(self.number, count)

    def chosen(self, a, b, places: list[int]):
        """A register of numbers from a and, behind them, b."""
        mask = ir.Constant(ir.VectorType(I32, len(places)), places)
        return self.builder.shuffle_vector(a, b, mask)

    def transposed(self, rows):
        """As many registers as numbers in each: swap one bit of the row with that of the column after the other."""
        rows, n, bit = list(rows), len(rows), 1
        while bit < n:
            for i in (i for i in range(n) if not i & bit):
                a, b = rows[i], rows[i | bit]
                rows[i] = self.chosen(a, b, [n + j - bit if j & bit else j for j in range(n)])
                rows[i | bit] = self.chosen(a, b, [n + j if j & bit else j + bit for j in range(n)])
            bit *= 2
        return rows


@intrinsic
def _block(typingctx, x, row, begin, depth, W, w_column, y, column, rows, registers):
    """y[row + n, column + l] += Σ_k x[row + n, begin + k] W[begin + k, w_column + l], n < rows, k < depth, l < width.

    The width is that of so many registers; it and `rows` are constants. Beyond the last row of x and y the last one
    stands in for others: the same numbers are written there again.
    """
    if not isinstance(registers, types.IntegerLiteral) or not isinstance(rows, types.IntegerLiteral):
        return None

    def generate(context, builder, _, values):
        def places(array, column):
            shape = cgutils.unpack_tuple(builder, array.shape)
            last = builder.sub(shape[0], I64(1))
            for n in range(rows.literal_value):
                at = builder.add(values[1], I64(n))
                at = builder.select(builder.icmp_signed("<", at, last), at, last)
                yield builder.gep(array.data, [builder.add(builder.mul(at, shape[1]), column)])

        size = x.dtype.bitwidth // 8
        X, w, Y = (context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (W, 4), (y, 6)))
        sources, targets = list(places(X, values[2])), list(places(Y, values[7]))
        (_, wide_x), (_, distance) = (cgutils.unpack_tuple(builder, array.shape) for array in (X, w))
        number = I64(rows.literal_value)
        next_rows = builder.add(builder.mul(builder.add(values[1], number), wide_x), values[2])
        next_rows = builder.gep(X.data, [next_rows])

        def strip(k):
            fetch(builder, builder.gep(next_rows, [builder.mul(k, number)]))
            at = builder.mul(builder.add(values[2], k), distance)
            begin = builder.gep(w.data, [builder.add(at, values[5])])
            for line in range(registers.literal_value * VECTOR // LINE):
                ahead = builder.add(builder.mul(distance, I64(AHEAD)), I64(line * LINE // size))
                fetch(builder, builder.gep(begin, [ahead]))
            return begin

        vectors = Registers(builder, w.data, size)
        sum_of_products(vectors, sources, targets, strip, values[3], registers.literal_value)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, W, n, y, n, rows, registers), generate


@intrinsic
def _block_of_transposed(typingctx, x, first, W, row, y, part, registers):
    """y[first + l, row + r] = Σ_k x[k, first + l] W[row + r, k], r < side, l < so many registers, or a half (part 2).

    Beyond the last row of W the last one stands in for others. What would be beyond the last row of y goes into that
    one, before its own sums do.
    """
    if not isinstance(registers, types.IntegerLiteral) or not isinstance(part, types.IntegerLiteral):
        return None

    def generate(context, builder, _, values):
        X, w, Y = (context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (W, 2), (y, 4)))
        (depth, wide_x), (wide_w, _), (high, wide_y) = (cgutils.unpack_tuple(builder, a.shape) for a in (X, w, Y))
        size, wide = x.dtype.bitwidth // 8, registers.literal_value
        lanes = max(side(size), VECTOR // size // part.literal_value)
        vectors, small = Lanes(builder, w.data, size, lanes), Lanes(builder, w.data, size, side(size))

        def clamped(at, number):
            last = builder.sub(number, I64(1))
            return builder.select(builder.icmp_signed("<", at, last), at, last)

        at = [clamped(builder.add(values[3], I64(r)), wide_w) for r in range(small.count)]
        sources = [builder.gep(w.data, [builder.mul(row, depth)]) for row in at]

        following = builder.gep(w.data, [builder.mul(builder.add(values[3], I64(small.count)), depth)])

        def add(k, sums):
            fetch(builder, builder.gep(following, [builder.mul(k, I64(small.count))]))
            begin = builder.gep(X.data, [builder.add(builder.mul(k, wide_x), values[1])])
            columns = [vectors.load(p) for p in vectors.at(begin, wide)]
            scales = [vectors.splat(vectors.load(builder.gep(p, [k]))) for p in sources]
            return [vectors.fused(scales[n // wide], columns[n % wide], total) for n, total in enumerate(sums)]

        sums = loop(builder, depth, [vectors.zero()] * (small.count * wide), add)
        for square in reversed(range(wide * lanes // small.count)):
            register, begin = divmod(square * small.count, lanes)
            pieces = [sums[r * wide + register] for r in range(small.count)]
            if lanes > small.count:
                pieces = [vectors.chosen(p, p, list(range(begin, begin + small.count))) for p in pieces]
            for l, numbers in reversed(list(enumerate(small.transposed(pieces)))):
                at = clamped(builder.add(values[1], I64(square * small.count + l)), high)
                place = builder.gep(Y.data, [builder.add(builder.mul(at, wide_y), values[3])])
                small.store(numbers, small.at(place, 1)[0])
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, W, n, y, part, registers), generate


@njit(error_model="numpy", nogil=True)
def _strip(x, begin, end, W, w_column, y, column):
    """WIDE registers of columns."""
    for row in range(0, x.shape[0], ROWS):
        if x.shape[0] - row > FEWER:
            _block(x, row, begin, end - begin, W, w_column, y, column, ROWS, WIDE)
        else:
            _block(x, row, begin, end - begin, W, w_column, y, column, FEWER, WIDE)


@njit(error_model="numpy", nogil=True)
def _pair_strip(x, begin, end, W, w_column, y, column):
    """Two registers of columns."""
    for row in range(0, x.shape[0], ROWS):
        _block(x, row, begin, end - begin, W, w_column, y, column, ROWS, 2)


@njit(error_model="numpy", nogil=True)
def _narrow_strip(x, begin, end, W, w_column, y, column):
    """One register of columns."""
    for row in range(0, x.shape[0], ROWS):
        _block(x, row, begin, end - begin, W, w_column, y, column, ROWS, 1)


@njit(error_model="numpy", nogil=True)
def add_plain_product(x, W, first, last, y):
    """y[:, : last − first] += x W[:, first:last] for y that is whole registers wide."""
    one = VECTOR // x.itemsize
    m, columns = W.shape
    middle = (last - first) // (WIDE * one) * (WIDE * one)
    rest = (last - first) // one * one  # behind it not all of a register is in W, and memory may end there
    tail = np.zeros((m if rest < last - first else 0, one), x.dtype)
    for k in range(tail.shape[0]):
        for c in range(last - first - rest):
            tail[k, c] = W[k, first + rest + c]
    for k in range(0, m, DEPTH):
        stop = min(k + DEPTH, m)
        for column in range(0, middle, WIDE * one):
            _strip(x, k, stop, W, first + column, y, column)
        if rest - middle == 2 * one:
            _pair_strip(x, k, stop, W, first + middle, y, middle)
        elif rest - middle == one:
            _narrow_strip(x, k, stop, W, first + middle, y, middle)
        if tail.shape[0] > 0:
            _narrow_strip(x, k, stop, tail, 0, y, rest)


@njit(error_model="numpy", nogil=True)
def times_transposed(x, W, begin, end, y):
    """y[:, begin:end] = (W[begin:end] x)ᵀ for x (columns of W, rows of y up to a multiple of 8).

    y is a multiple of 8 wide, and so is `begin`. What comes behind `end` is written up to there.
    """
    one = VECTOR // x.itemsize
    for row in range(begin, end, min(8, one)):
        first = 0
        while first < y.shape[0]:
            left = y.shape[0] - first
            if MOST == 3 and left > max(2 * one, 3 * one - 8):  # what x has, then, is three registers
                _block_of_transposed(x, first, W, row, y, 1, 3)
                first += 3 * one
            elif one == 16 and left <= 8:
                _block_of_transposed(x, first, W, row, y, 2, 1)
                first += 8
            else:
                _block_of_transposed(x, first, W, row, y, 1, 1)
                first += one
