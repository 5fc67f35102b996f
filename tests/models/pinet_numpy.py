"""PiNet and PiNet2 once more, in NumPy: pair by pair from the formulas, neighbours by brute force, complex numbers
allowed, so that derivatives come from a step h·i: f'(x) = Im f(x + ih)/h to rounding. Weights by PiNN's names.
"""

from __future__ import annotations

from itertools import product

import numpy as np

Weights = dict[str, np.ndarray]


def pairs(coord: np.ndarray, cell: np.ndarray | None, rc: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """i, j and r_j − r_i of all pairs closer than rc."""
    found = []
    reach = 0 if cell is None else 1 + int(np.ceil(rc * np.linalg.norm(np.linalg.inv(cell), axis=0).max()))
    if cell is not None:  # wrapped, so that few images are enough
        shift = -np.floor(coord.real @ np.linalg.inv(cell)) @ cell
        coord = coord + shift
    for i, j in product(range(len(coord)), repeat=2):
        for n in product(range(-reach, reach + 1), repeat=3):
            d = coord[j] - coord[i] + (0 if cell is None else np.array(n) @ cell)
            if 0 < np.linalg.norm(d.real) < rc:
                found.append((i, j, d))
    i, j, d = zip(*found, strict=True) if found else ((), (), ())
    return np.array(i, int), np.array(j, int), np.array(d).reshape(-1, 3)


def cutoff(kind: str, r: np.ndarray, rc: float) -> np.ndarray:
    return {
        "f1": 0.5 * (np.cos(np.pi * r / rc) + 1),
        "f2": (np.tanh(1 - r / rc) / np.tanh(1)) ** 3,
        "hip": np.cos(np.pi * r / (2 * rc)) ** 2,
    }[kind]


def basis(c, r: np.ndarray) -> np.ndarray:
    fc = cutoff(c.cutoff_type, r, c.rc)
    if c.basis_type == "polynomial":
        powers = range(1, c.n_basis + 1) if isinstance(c.n_basis, int) else c.n_basis
        return np.stack([fc**n for n in powers], axis=-1)
    centers = np.linspace(0, c.rc, c.n_basis) if c.center is None else np.array(c.center)
    return np.exp(-np.array(c.gamma) * (r[:, None] - centers) ** 2) * fc[:, None]


def dense(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.kernel"] + w.get(f"{name}.bias", 0.0)


def chain(w: Weights, name: str, x: np.ndarray, act=np.tanh) -> np.ndarray:
    k = 0
    while f"{name}.dense_layers.{k}.kernel" in w:
        x = act(dense(w, f"{name}.dense_layers.{k}", x))
        k += 1
    return x


def out(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return dense(w, f"{name}.out_units", chain(w, f"{name}.ff_layer", x, act=lambda y: y))


def interactions(w: Weights, name: str, P: np.ndarray, i: np.ndarray, j: np.ndarray, e: np.ndarray) -> np.ndarray:
    x = chain(w, f"{name}.pi_layer.ff_layer", np.concatenate([P[i], P[j]], axis=1))
    I = np.einsum("pcb,pb->pc", x.reshape(len(i), -1, e.shape[1]), e)  # noqa: E741
    return chain(w, f"{name}.ii_layer", I)


def onto_atoms(I: np.ndarray, i: np.ndarray, n: int) -> np.ndarray:  # noqa: E741
    total = np.zeros((n, *I.shape[1:]), I.dtype)
    np.add.at(total, i, I)
    return total


def residual(w: Weights, name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return (dense(w, f"{name}.transform", old) if f"{name}.transform.kernel" in w else old) + new


def pinet(w: Weights, c, P: np.ndarray, coord: np.ndarray, cell: np.ndarray | None) -> dict[str, np.ndarray]:
    """{"out": (n,)} from which element each atom is, P (n, types)."""
    i, j, d = pairs(coord, cell, c.rc)
    e = basis(c, np.sqrt((d**2).sum(1)))
    total = np.zeros((len(P), 1))
    for t in range(c.depth):
        Q = chain(w, f"gc_blocks.{t}.pp_layer", P) if t else P
        new = onto_atoms(interactions(w, f"gc_blocks.{t}", Q, i, j, e), i, len(P))
        total = total + out(w, f"out_layers.{t}", new)
        P = residual(w, f"res_update.{t}", P, new)
    return {"out": total[:, 0]}


def pinet2(w: Weights, c, P: np.ndarray, coord: np.ndarray, cell: np.ndarray | None) -> dict[str, np.ndarray]:
    """Of rank 1 or 3; also the sums over depth of p3, i1, i3 if there are layers that read them."""
    i, j, d = pairs(coord, cell, c.rc)
    r = np.sqrt((d**2).sum(1))
    e, unit = basis(c, r), d / r[:, None]
    P1, P3, total = P, np.zeros((len(P), 3, 1)), {}
    for t in range(c.depth):
        block = f"gc_blocks.{t}"
        i1 = interactions(w, f"{block}.invar_p1_layer", P1, i, j, e)
        p1 = chain(w, f"{block}.invar_p1_layer.pp_layer", onto_atoms(i1, i, len(P)))
        if c.rank == 1:
            new = {"p1": chain(w, f"{block}.pp_layer", p1), "i1": i1}
        else:
            part, vec = i1[:, i1.shape[1] // 2 :], f"{block}.equivar_p3_layer"
            seen = P3[j]
            if c.weighted:
                seen = dense(w, f"{vec}.pi_layer.wi", P3[i]) + dense(w, f"{vec}.pi_layer.wj", P3[j])
            i3 = seen * part[:, None, :] + unit[:, :, None] * part[:, None, :]
            p3 = onto_atoms(i3, i, len(P)) @ w[f"{vec}.pp_layer.dense_layers.0.kernel"]
            left, right = p3, p3
            if c.weighted:
                left, right = dense(w, f"{vec}.dot_layer.wi", p3), dense(w, f"{vec}.dot_layer.wj", p3)
            s = chain(w, f"{block}.pp_layer", np.concatenate([p1, (left * right).sum(1)], axis=1))
            half = s.shape[1] // 2
            new = {"p1": s[:, :half], "p3": p3 * s[:, None, half:], "i1": i1, "i3": i3}
            P3 = residual(w, f"res_update3.{t}", P3, new["p3"])
        for name, value in new.items():
            layer = f"out_layers.{t}" if name == "p1" else f"{name}_out_layers.{t}"
            if f"{layer}.out_units.kernel" in w:
                total[name] = total.get(name, 0) + out(w, layer, value)
        P1 = residual(w, f"res_update1.{t}", P1, new["p1"])
    return {**total, "out": total["p1"][:, 0], "pairs": (i, d)}


def energy_and_forces(network, w: Weights, c, P, coord, cell) -> tuple[np.ndarray, np.ndarray]:
    """Atomic energies (n,) and −∂E/∂r (n, 3), each component by a complex step."""
    forces = np.empty_like(coord)
    for place in np.ndindex(*coord.shape):
        moved = coord.astype(complex)
        moved[place] += 1e-30j
        forces[place] = -network(w, c, P, moved, cell)["out"].sum().imag / 1e-30
    return network(w, c, P, coord, cell)["out"], forces
