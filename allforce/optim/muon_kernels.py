"""Compiled loops for CPUs (numba) of HybridMuon's update, see muon.py for letters and equations.

Of stacks of matrices (k, ·, ·) every thread takes pieces: rows of X for the momentum, for B = X P and for the product
that moves a parameter, whole matrices for what is r × r. Sums over rows (Xᵀ Ω and Bᵀ B) are made in sections, on the
way, while the rows are in the cache, and the sections added in their order. So what becomes of a matrix does not depend
on the others in its stack, nor on the number of threads.
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import inline, options
from allforce.models.plain_products import add_plain_product, times_transposed
from allforce.models.pool import spread
from allforce.models.products import VECTOR, add_transposed_product

# digests of other files, see atom_kernels.py
KERNELS, PRODUCTS, PLAIN = "2726311b", "a61d4448", "abe0350c"

PIECE = 32  # rows of a large matrix
SECTION = 8 * PIECE  # rows whose part of a sum over all rows one thread makes
BLOCK = 512  # entries that are looked at together


@njit(**inline)
def piece_of(task, long):
    """Matrix, first row and row behind the last, of those that are `long`."""
    pieces = -(-long // PIECE)
    first = task % pieces * PIECE
    return task // pieces, first, min(first + PIECE, long)


@njit(**options)
def copy_rows(x, y):
    """The numbers of x in the first rows and columns of y, or as many as y has."""
    for k in range(min(x.shape[0], y.shape[0])):
        source, target = x[k], y[k]
        for c in range(min(source.shape[0], target.shape[0])):
            target[c] = source[c]


@njit(**options)
def add_scaled(x, factor, y):
    """y += factor x."""
    for n in range(y.shape[0]):
        y[n] += factor * x[n]


@njit(**options)
def add_up(parts, total):
    """total = Σ_n parts[n], in this order."""
    clear(total)
    for n in range(parts.shape[0]):
        add_scaled(parts[n].reshape(-1), total.dtype.type(1), total.reshape(-1))


@njit(**options)
def clear(x):
    """x = 0: as an assignment to a slice it would take a second to compile."""
    x = x.reshape(-1)
    for n in range(x.shape[0]):
        x[n] = 0


# ---- the momentum


@njit(**{**options, "fastmath": False})
def anything(x):
    """Whether an entry is not zero; one that is no number is not."""
    for first in range(0, x.shape[0], BLOCK):
        part = x[first : min(first + BLOCK, x.shape[0])]
        found = 0
        for n in range(part.shape[0]):
            found += part[n] != 0
        if found > 0:
            return True
    return False


@njit(**options)
def _follow(begin, end, gradient, places, weight, momentum, X, used, columns, signs, parts):
    for task in range(begin, end):
        k, section = task // parts.shape[1], task % parts.shape[1]
        part, w, stop = parts[k][section], weight * used[k], min((section + 1) * SECTION, X.shape[1])
        clear(part)
        for first in range(section * SECTION, stop, PIECE):
            last = min(first + PIECE, stop)
            m, x = momentum[k][first:last].reshape(-1), X[k][first:last].reshape(-1)
            start = places[k] + first * X.shape[2]
            g = gradient[start : start + m.shape[0]]
            for n in range(m.shape[0]):
                now = X.dtype.type(g[n])
                mean = m[n] + w * (now - m[n])
                m[n] = mean
                x[n] = mean + w * (now - mean)
            for i in range(first, last):
                for t in range(columns.shape[1]):
                    add_scaled(X[k][i], signs[i, t], part[columns[i, t]])


@njit(**options)
def follow(gradient, places, weight, momentum, X, used, columns, signs, parts, pool):
    """m ← m + w (g − m) and X = m + w (g − m) of matrices (k, ·, ·) whose gradient begins at places[k].

    parts (k, sections, r, short): of (Xᵀ Ω)ᵀ for Ω with signs[i] in the columns[i] of row i; both can be none.
    Where the gradient is zero, w is: nearly always it is not at the first entries, so one thread looks.
    """
    size = X.shape[1] * X.shape[2]
    for k in range(X.shape[0]):
        used[k] = 1 if anything(gradient[places[k] : places[k] + size]) else 0
    arguments = (gradient, places, weight, momentum, X, used, columns, signs, parts)
    spread(_follow, parts.shape[0] * parts.shape[1], arguments, pool)


# ---- the directions


@njit(**options)
def cholesky(S):
    """L with L Lᵀ = S, in the lower part of S."""
    for i in range(S.shape[0]):
        for j in range(i + 1):
            a, b = S[i][:j], S[j][:j]
            total = S[i, j]
            for c in range(a.shape[0]):
                total -= a[c] * b[c]
            S[i, j] = total / S[j, j] if j < i else np.sqrt(max(total, 1e-300))


@njit(**options)
def inverse_of_lower(L, inverse):
    """L⁻¹, row by row: (δ_i − Σ_{j<i} L_ij L⁻¹_j) / L_ii."""
    clear(inverse)
    for i in range(L.shape[0]):
        row = inverse[i]
        for j in range(i):
            factor, other = L[i, j], inverse[j]
            for c in range(row.shape[0]):
                row[c] -= factor * other[c]
        row[i] += 1
        factor = 1 / L[i, i]
        for c in range(row.shape[0]):
            row[c] *= factor


@njit(**options)
def _orthonormal(begin, end, parts, smallest, jitter, P):
    short, rank = P.shape[1:]
    y, S, inverse = np.empty((short, rank)), np.empty((rank, rank)), np.empty((rank, rank))
    sketch = np.empty((rank, short), parts.dtype)
    for k in range(begin, end):
        add_up(parts[k], sketch)
        factor = 1 / max(np.sqrt(sum_of_squares(sketch.reshape(-1))), smallest)
        for i in range(short):
            for j in range(rank):
                y[i, j] = factor * sketch[j, i]
        clear(S)
        add_transposed_product(y, y, S)
        for i in range(rank):
            S[i, i] += jitter
        cholesky(S)
        inverse_of_lower(S, inverse)
        for i in range(rank):
            for j in range(rank):
                S[i, j] = inverse[j, i]
        out = np.zeros_like(y)
        add_plain_product(y, S, 0, rank, out)
        scaled(out.reshape(-1), 1.0, P[k].reshape(-1))


@njit(**options)
def sum_of_squares(x):
    total = 0.0
    for n in range(x.shape[0]):
        total += np.float64(x[n]) * np.float64(x[n])
    return total


@njit(**options)
def scaled(x, factor, y):
    """y = factor x."""
    for n in range(y.shape[0]):
        y[n] = factor * x[n]


@njit(**options)
def orthonormal(parts, smallest, jitter, P, pool):
    """P (k, short, r), as muon.orthonormal for Yᵀ in parts (k, sections, r, short)."""
    spread(_orthonormal, parts.shape[0], (parts, smallest, jitter, P), pool)


@njit(**options)
def _narrow(begin, end, X, P, B, parts):
    for task in range(begin, end):
        k, section = task // parts.shape[1], task % parts.shape[1]
        first, last = section * SECTION, min((section + 1) * SECTION, X.shape[1])
        x, b = X[k][first:last], B[k][first:last]
        clear(b)
        for row in range(0, x.shape[0], PIECE):
            add_plain_product(x[row : row + PIECE], P[k], 0, P.shape[2], b[row : row + PIECE])
        clear(parts[k][section])
        add_transposed_product(b, b, parts[k][section])


@njit(**options)
def narrow(X, P, B, parts, R, pool):
    """B = X P (k, long, r) and R = Bᵀ B (k, r, r), from its parts (k, sections, r, r)."""
    spread(_narrow, parts.shape[0] * parts.shape[1], (X, P, B, parts), pool)
    for k in range(R.shape[0]):
        add_up(parts[k], R[k])


@njit(**options)
def _gram(begin, end, X, tall, R):
    long, short = max(X.shape[1:]), min(X.shape[1:])
    lanes = VECTOR // X.itemsize
    whole = -(-short // lanes) * lanes
    x, product = np.zeros((long, whole), X.dtype), np.empty((whole, whole), X.dtype)
    for k in range(begin, end):
        if tall:
            copy_rows(X[k], x)
        else:
            copy_rows(X[k].T, x)
        clear(product)
        add_transposed_product(x, x, product)
        copy_rows(product, R[k])


@njit(**options)
def gram(X, tall, R, pool):
    """R (k, short, short) = Xᵀ X, of X with the long side as rows (tall) or as columns."""
    spread(_gram, X.shape[0], (X, tall, R), pool)


# ---- the iteration


@njit(**options)
def times(x, y):
    """x y of square matrices with rows filled up to whole registers."""
    out = np.zeros_like(x)
    add_plain_product(x, y, 0, y.shape[1], out)
    return out


@njit(**options)
def combined(a, x, b, y, c):
    """a x + b y + c 1."""
    out = np.empty_like(x)
    p, q, z = x.reshape(-1), y.reshape(-1), out.reshape(-1)
    for n in range(z.shape[0]):
        z[n] = a * p[n] + b * q[n]
    for i in range(x.shape[0]):
        out[i, i] += c
    return out


@njit(**options)
def polynomial(R, square, c):
    """c_0 + c_1 R + R² (c_2 + c_3 R + c_4 R²)."""
    one = R.dtype.type(1)
    return combined(one, times(square, combined(c[4], square, c[3], R, c[2])), c[1], R, c[0])


@njit(**options)
def _inverse_root(begin, end, R, coefficients, smallest, rounding, Q):
    side, one, none = R.shape[1], R.dtype.type(1), R.dtype.type(0)
    lanes = VECTOR // R.itemsize
    for k in range(begin, end):
        A = np.zeros((side, -(-side // lanes) * lanes), R.dtype)
        copy_rows(R[k], A)
        size = max(np.sqrt(sum_of_squares(A.reshape(-1))), smallest)
        scaled(A.reshape(-1), R.dtype.type(1 / size), A.reshape(-1))
        square = times(A, A)
        bound = rounding * max(np.sqrt(np.sqrt(sum_of_squares(square.reshape(-1)))), 1e-3)
        scaled(A.reshape(-1), R.dtype.type(1 / bound), A.reshape(-1))
        scaled(square.reshape(-1), R.dtype.type(1 / bound**2), square.reshape(-1))
        half = combined(one, A, none, A, R.dtype.type(-0.5))  # see muon.inverse_root
        Z = polynomial(half, combined(one, square, -one, A, R.dtype.type(0.25)), coefficients[0])
        total = Z
        for c in range(1, coefficients.shape[0]):
            A = times(times(A, Z), Z)
            Z = polynomial(A, times(A, A), coefficients[c])
            total = times(total, Z)
        scaled(total.reshape(-1), R.dtype.type(1 / np.sqrt(size * bound)), total.reshape(-1))
        copy_rows(total, Q[k])


@njit(**options)
def inverse_root(R, coefficients, smallest, rounding, Q, pool):
    """Q with Q R Q ≈ 1, as muon.inverse_root."""
    spread(_inverse_root, R.shape[0], (R, coefficients, smallest, rounding, Q), pool)


# ---- the parameters


@njit(**options)
def _back_to_columns(begin, end, root, P, out):
    for task in range(begin, end):
        k, first, last = piece_of(task, P.shape[1])
        times_transposed(root[k], P[k], first, last, out[k])


@njit(**options)
def back_to_columns(root, P, out, pool):
    """R^(-1/2) Pᵀ (k, r, short), for a symmetric root; `short` is a multiple of 8."""
    spread(_back_to_columns, P.shape[0] * -(-P.shape[1] // PIECE), (root, P, out), pool)


@njit(**options)
def _move(begin, end, flat, places, left, right, keep):
    lanes, width = VECTOR // left.itemsize, right.shape[2]
    for task in range(begin, end):
        k, first, last = piece_of(task, left.shape[1])
        U = np.zeros((last - first, -(-width // lanes) * lanes), left.dtype)
        add_plain_product(left[k][first:last], right[k], 0, width, U)
        for i in range(last - first):
            start = places[k] + (first + i) * width
            p, u = flat[start : start + width], U[i]
            for c in range(p.shape[0]):
                p[c] = keep * p[c] + u[c]


@njit(**options)
def move(flat, places, left, right, keep, pool):
    """p ← keep p + left right of matrices that begin at places[k]; keep in their precision."""
    spread(_move, left.shape[0] * -(-left.shape[1] // PIECE), (flat, places, left, right, keep), pool)


@njit(**options)
def adam(flat, gradient, mean, square, places, b1, b2, t, epsilon, rate):
    """Adam for pieces of the parameters: `places` has where each begins, where its gradient does, and its length."""
    one, begin = mean.dtype.type(1), 0
    decay, decay_square = mean.dtype.type(b1), mean.dtype.type(b2)
    step, factor = mean.dtype.type(rate / (1 - b1**t)), mean.dtype.type(1 / (1 - b2**t))
    for n in range(places.shape[0]):
        size = places[n, 2]
        p, g = flat[places[n, 0] : places[n, 0] + size], gradient[places[n, 1] : places[n, 1] + size]
        m, v = mean[begin : begin + size], square[begin : begin + size]
        for k in range(size):
            m[k] += (one - decay) * (g[k] - m[k])
            v[k] = decay_square * v[k] + (one - decay_square) * g[k] * g[k]
            p[k] -= step * m[k] / (np.sqrt(factor * v[k]) + mean.dtype.type(epsilon))
        begin += size


# ---- all of it


@njit(**options)
def scaled_roots(R, coefficients, smallest, rounding, factor, used, pool):
    """factor · R^(-1/2) of stacks (k, r, r), 0 where a matrix is not used."""
    Q = np.empty_like(R)
    inverse_root(R, coefficients, smallest, rounding, Q, pool)
    for k in range(R.shape[0]):
        scaled(Q[k].reshape(-1), factor * used[k], Q[k].reshape(-1))
    return Q


@njit(**options)
def update(
    gradient, gradient_places, weight, momentum, X, used, columns, signs, sketch, jitter, coefficients, smallest,
    rounding, factor, flat, places, keep, pool,
):  # fmt: skip
    """Momentum and parameters of tall matrices, of which the directions in Ω's columns are followed."""
    (count, long, short), rank, sections = X.shape, sketch.shape[2], sketch.shape[1]
    follow(gradient, gradient_places, weight, momentum, X, used, columns, signs, sketch, pool)
    P, B = np.empty((count, short, rank), X.dtype), np.empty((count, long, rank), X.dtype)
    parts, R = np.empty((count, sections, rank, rank), X.dtype), np.empty((count, rank, rank), X.dtype)
    orthonormal(sketch, smallest, jitter, P, pool)
    narrow(X, P, B, parts, R, pool)
    Q, right = (
        scaled_roots(R, coefficients, smallest, rounding, factor, used, pool),
        np.empty((count, rank, short), X.dtype),
    )
    back_to_columns(Q, P, right, pool)
    move(flat, places, B, right, keep, pool)


@njit(**options)
def update_small(
    gradient, gradient_places, weight, momentum, X, used, sketch, tall, coefficients, smallest, rounding, factor, flat,
    places, keep, pool,
):  # fmt: skip
    """The same of matrices that are taken whole."""
    short = min(X.shape[1:])
    columns, signs, R = (
        np.empty((0, 0), np.int64),
        np.empty((0, 0), X.dtype),
        np.empty((X.shape[0], short, short), X.dtype),
    )
    follow(gradient, gradient_places, weight, momentum, X, used, columns, signs, sketch, pool)
    gram(X, tall, R, pool)
    Q = scaled_roots(R, coefficients, smallest, rounding, factor, used, pool)  # symmetric
    move(flat, places, X if tall else Q, Q if tall else X, keep, pool)
