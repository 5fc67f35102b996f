"""Matrix products inside compiled loops, on one core: some rows times a matrix that does not change.

    y (n, ·) += x (n, m) W (m, columns)

W is packed once: its columns in strips as wide as a vector register, each strip in one piece. A library packs W in
every call, which for some ten rows takes as long as a third of the product.

Where x is zero but in few columns, the rows of W that these meet are given as a list, and W is as it lies (add_listed,
its transpose times_listed, and add_outer for the gradient of W).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from allforce.loops import njit

# Bytes of a vector register; rows of x and registers of columns whose products are summed together, in registers.
VECTOR, ROWS, WIDE = (64, 8, 3) if binding.get_host_cpu_features().get("avx512f", False) else (32, 4, 3)
DEPTH = 256  # rows of W at a time, so that a piece of a strip and of x stay in the nearest cache
TILE = 64  # rows that one thread takes together, at most
I32, I64 = ir.IntType(32), ir.IntType(64)


def lanes(dtype: np.dtype) -> int:
    """Numbers in a register."""
    return VECTOR // dtype.itemsize


def whole_strips(columns: int, dtype: np.dtype) -> int:
    """Columns filled up to whole registers: how wide y must be."""
    return -(-columns // lanes(dtype)) * lanes(dtype)


def packed(W: np.ndarray) -> np.ndarray:
    """W (m, columns) as strips (m, ·) one behind the other: of WIDE registers, then of one for what is left."""
    out = np.empty(len(W) * whole_strips(W.shape[1], W.dtype), W.dtype)
    pack(W, out)
    return out


@njit(error_model="numpy", nogil=True)
def pack(W, out):
    """The same, into `out`."""
    m, columns = W.shape
    one = VECTOR // W.itemsize
    middle = columns // (WIDE * one) * (WIDE * one)
    column, at = 0, 0
    while column < columns:
        width = WIDE * one if column < middle else one
        there = min(width, columns - column)
        for k in range(m):
            for c in range(there):
                out[at + c] = W[k, column + c]
            for c in range(there, width):
                out[at + c] = 0
            at += width
        column += width


@lru_cache(maxsize=64)
def tiles_of(counts: tuple[int, ...], threads: int, most: int = TILE) -> np.ndarray:
    """(tiles, 3): first row, row behind the last one, and kind, for rows of which counts[k] are of kind k.

    At most so many together, and as many for each thread, unless these were too few to fill the registers.
    """
    tiles, first = [], 0
    for kind, count in enumerate(counts):
        number = min(threads * -(-count // (threads * most)), -(-count // ROWS))
        ends = first + np.arange(number + 1) * count // max(1, number)
        tiles += [(a, b, kind) for a, b in pairwise(ends.tolist())]
        first += count
    return np.array(tiles, dtype=np.int64).reshape(-1, 3)


@njit(inline="always")
def highest(tiles, begin, end):
    """Rows of the largest of some tiles."""
    most = 0
    for tile in range(begin, end):
        most = max(most, tiles[tile, 1] - tiles[tile, 0])
    return most


class Registers:
    """Vector instructions, of numbers as a pointer points to, at the place where a builder writes."""

    def __init__(self, builder, pointer, size: int):
        self.builder, self.size, self.count = builder, size, VECTOR // size
        self.number = pointer.type.pointee
        self.vector = ir.VectorType(self.number, self.count)

    def at(self, pointer, wide: int):
        """Pointers to so many registers, side by side."""
        places = [self.builder.gep(pointer, [I64(v * self.count)]) for v in range(wide)]
        return [self.builder.bitcast(p, self.vector.as_pointer()) for p in places]

    def load(self, pointer, mask=None):
        """A number or a register; with a mask zeros where it is false, and nothing is read there."""
        if mask is not None:
            return self.masked("load", self.vector, [pointer, I32(self.size), mask, self.zero()])
        value = self.builder.load(pointer)
        value.align = self.size
        return value

    def store(self, value, pointer, mask=None) -> None:
        """With a mask nothing is written where it is false."""
        if mask is None:
            self.builder.store(value, pointer).align = self.size
        else:
            self.masked("store", ir.VoidType(), [value, pointer, I32(self.size), mask])

    def masked(self, what: str, result, arguments):
        kind = ir.FunctionType(result, [a.type for a in arguments])
        name = f"llvm.masked.{what}.v{self.count}f{8 * self.size}.p0"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def first(self, number):
        """The mask of so many numbers of a register, all if they are more than it has."""
        kind = ir.VectorType(I64, self.count)
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(self.count))), self.copies(number, kind))

    def splat(self, value):
        return self.copies(value, self.vector)

    def copies(self, value, vector):
        """A vector of so many times the same."""
        single = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, self.count), [0] * self.count)
        return self.builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), zeros)

    def fused(self, a, b, c):
        """a b + c."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def total(self, value):
        """The sum of all numbers in a register."""
        kind = ir.FunctionType(self.number, [self.number, self.vector])
        name = f"llvm.vector.reduce.fadd.v{self.count}f{8 * self.size}"
        reduce = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(reduce, [ir.Constant(self.number, -0.0), value], fastmath=("reassoc",))

    def zero(self):
        return ir.Constant(self.vector, [0.0] * self.count)


def loop(builder, count, initial, step):
    """for k < count: values = step(k, values), which begin as `initial`; what they are at the end."""
    before = builder.block
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    k, values = builder.phi(I64), [builder.phi(value.type) for value in initial]
    builder.cbranch(builder.icmp_signed("<", k, count), body, end)
    builder.position_at_end(body)
    grown = [builder.add(k, I64(1)), *step(k, values)]
    for phi, first, then in zip((k, *values), (I64(0), *initial), grown, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, builder.block)
    builder.branch(head)
    builder.position_at_end(end)
    return values


def sum_of_products(registers: Registers, sources, targets, strip, depth, wide: int, step=I64(1), mask=None) -> None:  # noqa: B008
    """targets[n][l] += Σ_k sources[n][k·step] strip(k)[l], k < depth, l < as many as `wide` registers hold: one sum for
    each row and register. All are pointers; strip(k) gives one. The mask is for a strip that ends within a register."""
    builder = registers.builder
    places = [p for row in targets for p in registers.at(row, wide)]

    def add(k, sums):
        columns = [registers.load(p, mask) for p in registers.at(strip(k), wide)]
        place = builder.mul(k, step)
        scales = [registers.splat(registers.load(builder.gep(p, [place]))) for p in sources]
        return [registers.fused(scales[n // wide], columns[n % wide], total) for n, total in enumerate(sums)]

    sums = loop(builder, depth, [registers.load(p) for p in places], add)
    for value, pointer in zip(sums, places, strict=True):
        registers.store(value, pointer)


@intrinsic
def _block(typingctx, x, row, begin, depth, w, w_begin, y, column, registers):
    """y[row + n, column + l] += Σ_k x[row + n, begin + k] w[w_begin + k·width + l], n < ROWS, k < depth, l < width.

    The width is that of so many registers, a constant. Beyond the last row of x and y the last one stands in for
    others: the same numbers are written there again.
    """
    if not isinstance(registers, types.IntegerLiteral):
        return None

    def generate(context, builder, _, values):
        def rows(array, column):
            """Where each of them begins."""
            shape = cgutils.unpack_tuple(builder, array.shape)
            last = builder.sub(shape[0], I64(1))
            for n in range(ROWS):
                at = builder.add(values[1], I64(n))
                at = builder.select(builder.icmp_signed("<", at, last), at, last)
                yield builder.gep(array.data, [builder.add(builder.mul(at, shape[1]), column)])

        X, W, Y = (context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (w, 4), (y, 6)))
        sources, targets = list(rows(X, values[2])), list(rows(Y, values[7]))
        vectors, wide = Registers(builder, W.data, x.dtype.bitwidth // 8), registers.literal_value
        begin = builder.gep(W.data, [values[5]])

        def strip(k):
            return builder.gep(begin, [builder.mul(k, I64(wide * vectors.count))])

        sum_of_products(vectors, sources, targets, strip, values[3], wide)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, w, n, y, n, registers), generate


@intrinsic
def _block_of_transposed(typingctx, x, row, z, y, column, registers):
    """y[row + n, column + l] += Σ_k x[k, row + n] z[k, column + l], n < ROWS, all k, l < width, as in _block."""
    if not isinstance(registers, types.IntegerLiteral):
        return None

    def generate(context, builder, _, values):
        X, Z, Y = (context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (z, 2), (y, 3)))
        (depth, wide_x), (_, wide_z), (_, wide_y) = (cgutils.unpack_tuple(builder, a.shape) for a in (X, Z, Y))
        sources, targets, last = [], [], builder.sub(wide_x, I64(1))
        for n in range(ROWS):
            at = builder.add(values[1], I64(n))
            at = builder.select(builder.icmp_signed("<", at, last), at, last)
            sources.append(builder.gep(X.data, [at]))
            targets.append(builder.gep(Y.data, [builder.add(builder.mul(at, wide_y), values[4])]))

        def strip(k):
            return builder.gep(Z.data, [builder.add(builder.mul(k, wide_z), values[4])])

        vectors = Registers(builder, Z.data, x.dtype.bitwidth // 8)
        sum_of_products(vectors, sources, targets, strip, depth, registers.literal_value, wide_x)
        return context.get_dummy_value()

    return types.void(x, types.intp, z, y, types.intp, registers), generate


@intrinsic
def _listed_block(typingctx, x, rows, count, W, y, column, registers):
    """y[n, column + l] += Σ_k x[n, k] W[rows[k], column + l], n < 4, k < count, l < the width of so many registers.

    A single register may reach beyond the last column of W, with zeros there, but not of y.
    """
    if not isinstance(registers, types.IntegerLiteral):
        return None

    def generate(context, builder, _, values):
        X, R, C, Y = (
            context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (rows, 1), (W, 3), (y, 4))
        )
        most, width, wide_y = (cgutils.unpack_tuple(builder, array.shape)[1] for array in (X, C, Y))
        sources = [builder.gep(X.data, [builder.mul(I64(n), most)]) for n in range(4)]
        targets = [builder.gep(Y.data, [builder.add(builder.mul(I64(n), wide_y), values[5])]) for n in range(4)]

        def strip(k):
            row = builder.load(builder.gep(R.data, [k]))
            return builder.gep(C.data, [builder.add(builder.mul(row, width), values[5])])

        vectors, wide = Registers(builder, C.data, x.dtype.bitwidth // 8), registers.literal_value
        mask = vectors.first(builder.sub(width, values[5])) if wide == 1 else None
        sum_of_products(vectors, sources, targets, strip, values[2], wide, mask=mask)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, rows, n, W, y, n, registers), generate


@intrinsic
def times_listed(typingctx, x, rows, count, W, y):
    """y[n, rows[k]] = Σ_l x[n, l] W[rows[k], l], n < 4, k < count; two rows of W at a time."""

    def generate(context, builder, _, values):
        X, R, C, Y = (
            context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (rows, 1), (W, 3), (y, 4))
        )
        width, columns = (cgutils.unpack_tuple(builder, array.shape)[1] for array in (C, Y))
        vectors = Registers(builder, C.data, x.dtype.bitwidth // 8)
        last = builder.sub(values[2], I64(1))
        whole = builder.sdiv(builder.sub(width, I64(1)), I64(vectors.count))  # registers before the last one
        mask = vectors.first(builder.sub(width, builder.mul(whole, I64(vectors.count))))

        def pair(k, _):
            first = builder.mul(k, I64(2))
            second = builder.add(first, I64(1))
            second = builder.select(builder.icmp_signed("<", second, last), second, last)
            listed = [builder.load(builder.gep(R.data, [at])) for at in (first, second)]

            def products(register, sums, mask=None):
                column = builder.mul(register, I64(vectors.count))

                def part(array, row):
                    place = builder.gep(array.data, [builder.add(builder.mul(row, width), column)])
                    return vectors.load(vectors.at(place, 1)[0], mask)

                ws, xs = [part(C, row) for row in listed], [part(X, I64(n)) for n in range(4)]
                return [vectors.fused(ws[n // 4], xs[n % 4], total) for n, total in enumerate(sums)]

            sums = products(whole, loop(builder, whole, [vectors.zero()] * 8, products), mask)
            for n, value in enumerate(sums):
                place = builder.add(builder.mul(I64(n % 4), columns), listed[n // 4])
                builder.store(vectors.total(value), builder.gep(Y.data, [place]))
            return []

        loop(builder, builder.sdiv(builder.add(values[2], I64(1)), I64(2)), [], pair)
        return context.get_dummy_value()

    return types.void(x, rows, types.intp, W, y), generate


@intrinsic
def add_outer(typingctx, x, rows, count, z, y, column, registers):
    """y[rows[k], column + l] += Σ_n x[n, k] z[n, column + l], n < 4, k < count, l < the width of so many registers.

    z and y are equally wide, and a single register may reach beyond. Each sum is the same with any number of registers.
    """
    if not isinstance(registers, types.IntegerLiteral):
        return None

    def generate(context, builder, _, values):
        X, R, Z, Y = (
            context.make_array(kind)(context, builder, values[n]) for kind, n in ((x, 0), (rows, 1), (z, 3), (y, 4))
        )
        most, width = (cgutils.unpack_tuple(builder, array.shape)[1] for array in (X, Y))
        vectors, wide = Registers(builder, Y.data, x.dtype.bitwidth // 8), registers.literal_value
        mask = vectors.first(builder.sub(width, values[5])) if wide == 1 else None
        sources = [builder.gep(X.data, [builder.mul(I64(n), most)]) for n in range(4)]

        def strip(array, row):
            place = builder.add(builder.mul(row, width), values[5])
            return vectors.at(builder.gep(array.data, [place]), wide)

        factors = [[vectors.load(p, mask) for p in strip(Z, I64(n))] for n in range(4)]

        def add(k, _):
            places = strip(Y, builder.load(builder.gep(R.data, [k])))
            sums = [vectors.load(p, mask) for p in places]
            for source, factor in zip(sources, factors, strict=True):
                scale = vectors.splat(vectors.load(builder.gep(source, [k])))
                sums = [vectors.fused(scale, f, total) for f, total in zip(factor, sums, strict=True)]
            for total, place in zip(sums, places, strict=True):
                vectors.store(total, place, mask)
            return []

        loop(builder, values[2], [], add)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, rows, n, z, y, n, registers), generate


@njit(error_model="numpy", nogil=True)
def add_product(x, begin, end, w, m, columns, y):
    """y[:, :columns] += x[:, begin:end] W[begin:end] for W (m, columns) packed in w."""
    one = VECTOR // x.itemsize
    middle = columns // (WIDE * one) * (WIDE * one)
    for k in range(begin, end, DEPTH):
        stop = min(k + DEPTH, end)
        for column in range(0, middle, WIDE * one):
            for row in range(0, x.shape[0], ROWS):
                _block(x, row, k, stop - k, w, column * m + k * (WIDE * one), y, column, WIDE)
        for column in range(middle, columns, one):
            for row in range(0, x.shape[0], ROWS):
                _block(x, row, k, stop - k, w, column * m + k * one, y, column, 1)


@njit(error_model="numpy", nogil=True)
def add_listed(x, rows, count, W, y):
    """y (4, whole strips) += x[:, :count] W[rows[:count]]."""
    one = VECTOR // x.itemsize
    middle = W.shape[1] // (WIDE * one) * (WIDE * one)
    for column in range(0, middle, WIDE * one):
        _listed_block(x, rows, count, W, y, column, WIDE)
    for column in range(middle, W.shape[1], one):
        _listed_block(x, rows, count, W, y, column, 1)


@njit(error_model="numpy", nogil=True)
def add_transposed_product(x, z, y):
    """y[:, :columns] += xᵀ z for x (n, rows of y) and z (n, columns).

    y is whole strips wide, and what comes behind z is read up to a whole strip, without effect on these columns.
    """
    one = VECTOR // x.itemsize
    columns = z.shape[1]
    middle = columns // (WIDE * one) * (WIDE * one)
    for column in range(0, middle, WIDE * one):
        for row in range(0, x.shape[1], ROWS):
            _block_of_transposed(x, row, z, y, column, WIDE)
    for column in range(middle, columns, one):
        for row in range(0, x.shape[1], ROWS):
            _block_of_transposed(x, row, z, y, column, 1)
