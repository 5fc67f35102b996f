"""Matrix products inside compiled loops, on one core: some rows times a matrix that does not change.

    y (n, ·) += x (n, m) W (m, columns)

W is packed once: its columns in strips as wide as a vector register, each strip in one piece. A library packs W in
every call, which for some ten rows takes as long as a third of the product.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

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


def packed(W: np.ndarray, wide: int = WIDE) -> np.ndarray:
    """W (m, columns) as strips (m, ·) one behind the other: of `wide` registers, then of one for what is left."""
    one, columns = lanes(W.dtype), whole_strips(W.shape[1], W.dtype)
    whole = np.zeros((len(W), columns), W.dtype)
    whole[:, : W.shape[1]] = W
    middle = W.shape[1] // (wide * one) * (wide * one)
    cuts = [*range(wide * one, middle + 1, wide * one), *range(middle + one, columns, one)]
    return np.concatenate([strip.ravel() for strip in np.split(whole, cuts, axis=1)])


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
        strip = builder.gep(W.data, [values[5]])
        sum_of_products(builder, sources, strip, targets, values[3], registers.literal_value, x.dtype.bitwidth // 8)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, w, n, y, n, registers), generate


def sum_of_products(builder, sources, strip, targets, depth, wide: int, size: int) -> None:
    """The loop over k < depth, with one sum for each row and each of the `wide` registers of columns. All are pointers
    to numbers of so many bytes: to the rows of x, to w and to the rows of y."""
    count = VECTOR // size
    vector = ir.VectorType(strip.type.pointee, count)

    def vectors(pointer):
        return [builder.bitcast(builder.gep(pointer, [I64(v * count)]), vector.as_pointer()) for v in range(wide)]

    def load(pointer):
        value = builder.load(pointer)
        value.align = size
        return value

    def splat(value):
        single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), zeros)

    def fused(a, b, c):
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    places = [p for row in targets for p in vectors(row)]
    initial, before = [load(p) for p in places], builder.block
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    k, sums = builder.phi(I64), [builder.phi(vector) for _ in places]
    builder.cbranch(builder.icmp_signed("<", k, depth), body, end)
    builder.position_at_end(body)
    columns = [load(p) for p in vectors(builder.gep(strip, [builder.mul(k, I64(wide * count))]))]
    scales = [splat(load(builder.gep(p, [k]))) for p in sources]
    grown = [fused(scales[n // wide], columns[n % wide], total) for n, total in enumerate(sums)]
    for phi, first, then in zip((k, *sums), (I64(0), *initial), (builder.add(k, I64(1)), *grown), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, body)
    builder.branch(head)
    builder.position_at_end(end)
    for value, pointer in zip(sums, places, strict=True):
        builder.store(value, pointer).align = size


@njit(error_model="numpy", nogil=True)
def add_strip(x, begin, end, w, m, column, y):
    """y (n, whole strips) += x[:, begin:end] W[begin:end] in the register of columns from `column` on; w: W packed."""
    for row in range(0, x.shape[0], ROWS):
        _block(x, row, begin, end - begin, w, column * m + begin * (VECTOR // x.itemsize), y, column, 1)


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
            add_strip(x, k, stop, w, m, column, y)
