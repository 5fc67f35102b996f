"""The descriptor se_atten (dpa1): one embedding net for all types, which a type embedding tells apart, and attention.

    t_τ: a trained vector for each type                                                               (nt, tebd_dim)
    concat:  G_e = net([x_e, t_j, t_i])                                  x_e = R̂_e0, see two_body.py
    strip:   G_e = g + g ⊙ h w_e,   g = net(x_e),  h = net'([t_j, t_i])    w_e = 1, or the switch function if smooth
    G of the neighbours of an atom passes `attn_layer` layers of attention (attention.py)
    T_i = (1/sel) Σ_e R̂_e ⊗ G_e,   D_i = [T_iᵀ T_i[:, :M2], t_i]          t_i left out unless concat_output_tebd

With type_one_side t_i does not enter G. Without attention G is a curve of x for each pair of types, and it is trained
on a table like that of se_e2_a; the curves of the types that a batch has are all that is evaluated. An empty slot of
`sel` counts as R = 0 and as a neighbour of the lowest type of the frame, which is how DeePMD-kit fills slots of frames
that are sorted by type; it matters where davg is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allforce.config.keys import AutoSel, Int, NonNegative, Width
from allforce.config.section import WIDEST, Section, key
from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.models.atten_nets import AttenNets
from allforce.models.attention import AttentionLayer, Neighbors
from allforce.models.env_stat import load_slots, slots
from allforce.models.envmat import switch
from allforce.models.layers import Net, generator
from allforce.models.moments import Geometry, TablePull, TableSum
from allforce.models.pull import Pull
from allforce.models.sel import complete_sel
from allforce.models.serial import collection, copy_nets, layer_from_pt, nets_from_pt, refuse
from allforce.models.two_body import Moments, MomentsConfig, sum_over_edges

ROWS = 2048  # neighbours that attention layers take at a time on a CPU: what passes between them stays in the cache
WORTH = 4  # the table pays as long as its rows are fewer than this times the edges

Slots = AutoSel | NonNegative | list[NonNegative]


class AttentionKeys(MomentsConfig):
    """Keys that se_atten and se_atten_v2 share."""

    sel: Slots = key(
        "auto",
        'Largest number of neighbours kept, of all types together (a list is summed up); or "auto:f": the largest '
        'number in the training data times f ("auto" is "auto:1.1").',
    )
    type_one_side: bool = key(
        False, "true: the embedding knows the type of the neighbour; false: also that of the centre."
    )
    attn: Width = key(128, "Width of the attention layers.")
    attn_layer: Int = key(2, "Number of attention layers; 0 is by far the fastest.", ge=0, le=WIDEST)
    attn_dotr: bool = key(True, "Weight the attention of two neighbours by the cosine of their angle.")
    attn_mask: bool = key(False, "Only false is supported.")
    trainable_ln: bool = key(True, "Whether the layer normalisation is trained.")
    ln_eps: float | None = key(None, "Added to the variance in the layer normalisation; 1e-5 when left out.", gt=0)
    tebd_dim: Width = key(8, "Width of the type embedding.")
    use_econf_tebd: bool = key(False, "Only false is supported.")
    use_tebd_bias: bool = key(False, "A trained constant in the type embedding.")
    scaling_factor: float = key(1.0, "The attention is scaled by 1/√(attn · scaling_factor).", gt=0)
    normalize: bool = key(True, "Divide queries, keys and values of the attention by their length.")
    temperature: float | None = key(None, "Scale of the attention, instead of scaling_factor.", gt=0)
    concat_output_tebd: bool = key(True, "Append the type embedding of the atom to its descriptor.")
    lmax: Literal[1] | None = key(None, "Only 1 is supported.")

    @property
    def strip(self) -> bool:
        raise NotImplementedError

    @property
    def smooth(self) -> bool:
        raise NotImplementedError

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        for name in ("attn_mask", "use_econf_tebd"):
            if getattr(self, name):
                yield name, "true is not supported; expected false"


class SeAttenConfig(AttentionKeys):
    """Deep Potential with type embedding and attention (DPA-1): one net for any number of types."""

    type_aliases = ("dpa1",)

    type: Literal["se_atten"] = key("se_atten", 'Kind of descriptor (required): "se_atten", or "dpa1".')
    set_davg_zero: bool = key(True, "Use zero for the mean of the environment matrix.", free=True)
    tebd_input_mode: Literal["concat", "strip"] = key(
        "concat",
        'How types enter the embedding: "concat", as input of the net beside the distance; "strip", by a net of their '
        "own whose output multiplies.",
    )
    smooth_type_embedding: bool = key(
        False,
        "Switch attention, and with strip the type embedding, off smoothly at rcut.",
        aliases=("smooth_type_embdding",),
    )
    stripped_type_embedding: bool | None = key(None, 'Old name: true is tebd_input_mode "strip".')

    @property
    def strip(self) -> bool:
        return bool(self.stripped_type_embedding) or self.tebd_input_mode == "strip"

    @property
    def smooth(self) -> bool:
        return self.smooth_type_embedding


class SeAttenV2Config(AttentionKeys):
    """se_atten with tebd_input_mode "strip" and smooth_type_embedding."""

    type: Literal["se_atten_v2"] = key("se_atten_v2", 'Kind of descriptor (required): "se_atten_v2".')

    @property
    def strip(self) -> bool:
        return True

    @property
    def smooth(self) -> bool:
        return True


class SeAtten(Moments):
    """D (N, M1·M2 [+ tebd_dim]) of a batch."""

    Config: ClassVar[type[Section]] = SeAttenConfig
    pt_part = ".se_atten"
    mixed_sel = True
    mixed_types = True
    nets: AttenNets

    def __init__(self, config: AttentionKeys, ntypes: int):
        super().__init__(config, ntypes)
        self.M1, self.M2 = config.neuron[-1], config.axis_neuron
        self.dim_vectors = self.M1
        self.dim = self.M1 * self.M2 + (config.tebd_dim if config.concat_output_tebd else 0)
        self.nets = AttenNets(config, ntypes, self.dtype)
        self.attention: list[AttentionLayer] = nn.ModuleList(  # type: ignore[assignment]
            AttentionLayer(config, self.M1, generator(config.seed, 0, 3, n), self.dtype)
            for n in range(config.attn_layer)
        )
        if not config.trainable:
            self.requires_grad_(False)
        self.padded = True  # whether empty slots add something
        self.known: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def has_curves(self) -> bool:  # type: ignore[override]
        return not self.attention

    @classmethod
    def complete(cls, config: Any, count: Any, before: Any = None) -> tuple[Any, list[str]]:
        if isinstance(config.sel, list):
            config = config.model_copy(update={"sel": sum(config.sel)})
        return complete_sel(config, count, before, mixed=True)

    def prepare(self, table, nearest) -> None:
        super().prepare(table, nearest)
        self.padded = bool((self.davg != 0).any())

    # ---- the equation

    def of_types(self, batch: Batch) -> list[Tensor]:
        return [F.embedding(batch.type, self.nets.types())] if self.config.concat_output_tebd else []

    def embedding(self, batch: Batch, r: Tensor) -> Tensor:
        i, j = batch.edges.i, batch.edges.j
        R, w, types = *self.rows_and_switch(batch, r, i, j), (batch.type[i], batch.edges.type[j])
        if self.on_table(batch):
            G = self.interpolated(R[:, :1], *types, w)
            if batch.edges.nearest < self.r_close:
                G = torch.where(self.beyond(r)[:, None], self.values(R[:, :1], *types, w), G)
        else:
            G = self.values(R[:, :1], *types, w)
        T = self.attend(batch, R, G, w) if self.attention else sum_over_edges(i, R, G, len(batch.type))
        return (T + self.empty_slots(batch) if self.padded else T) / self.nnei

    def embedding_of(self, batch: Batch, r: Tensor, subset: Tensor) -> Tensor:
        i, j, r = batch.edges.i[subset], batch.edges.j[subset], r[subset]
        R, w = self.rows_and_switch(batch, r, i, j)
        G = self.values(R[:, :1], batch.type[i], batch.edges.type[j], w)
        return sum_over_edges(i, R, G, len(batch.type)) / self.nnei

    def rows_and_switch(self, batch: Batch, r: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """R̂ (E, 4) and the switch function (E, 1)."""
        w = switch(torch.linalg.vector_norm(r, dim=1, keepdim=True), *self.radii()[:2])
        return self.rows(batch, r, i, j), w.to(self.dtype)

    def values(self, x: Tensor, center: Tensor, neighbor: Tensor, w: Tensor) -> Tensor:
        """G (E, M1) by the nets."""
        types = self.nets.of_pairs(center, neighbor)
        if self.nets.strip_net is None:
            return self.nets.net(torch.cat([x, types], 1))
        g, h = self.nets.net(x), self.nets.strip_net(types)
        return g + g * (h * w if self.config.smooth else h)

    def interpolated(self, x: Tensor, center: Tensor, neighbor: Tensor, w: Tensor) -> Tensor:
        """The same by the splines of all pairs of types."""
        nt, grid = self.ntypes, self.table.grid
        assert grid is not None
        centers = 1 if self.config.type_one_side else nt
        a, b = torch.cartesian_prod(torch.arange(centers, device=x.device), torch.arange(nt, device=x.device)).T
        C = self.coefficients(a, b)  # (curves, K, M1)
        pair = (0 if centers == 1 else center) * nt + neighbor
        k, value, _ = grid.weights(x[:, 0].clamp(max=grid.hi))
        first = (0 if len(C) == 1 else pair * grid.K) + k
        rows = C.flatten(0, 1)[first[:, None] + torch.arange(value.shape[1], device=x.device)]
        g = (value[:, :, None].to(C.dtype) * rows).sum(1)
        if self.nets.strip_net is None:
            return g
        h = self.nets.strip_net(self.nets.of_pairs(a, b))[pair]
        return g + g * (h * w if self.config.smooth else h)

    def empty_slots(self, batch: Batch) -> Tensor:
        """(sel − n_i) p ⊗ G(p_0), p = −davg/dstd of the centre: what the padding of `sel` adds to T."""
        p = (-self.davg / self.dstd).to(self.dtype)[batch.type]  # (N, 4)
        G = self.values(p[:, :1], batch.type, batch.lowest[batch.frame], torch.zeros_like(p[:, :1]))
        for layer in self.attention:
            G = layer.alone(G)
        empty = (self.nnei - batch.edges.first.diff()).clamp(min=0.0).to(self.dtype)
        return empty[:, None, None] * p[:, :, None] * G[:, None, :]

    def attend(self, batch: Batch, R: Tensor, G: Tensor, w: Tensor) -> Tensor:
        """Σ_e R̂_e ⊗ G_e after the attention layers, neighbours of an atom side by side."""
        i, j = batch.edges.i, batch.edges.j
        place, first, sizes = self.pieces(batch.edges.first.diff())
        index = first[i] + torch.arange(len(i), device=i.device) - batch.edges.first[i]
        rows = [atoms * n for atoms, n in sizes]

        def dense(values: Tensor) -> list[Tensor]:
            all_rows = values.new_zeros(sum(rows), values.shape[1]).index_copy(0, index, values)
            return [x.view(*size, x.shape[1]) for x, size in zip(all_rows.split(rows), sizes, strict=True)]

        used = self.used[batch.type[i], batch.edges.type[j]][:, None].to(w.dtype)
        columns = [dense(x) for x in (G, R, used, w * used, F.normalize(R[:, 1:]))]
        parts = []
        for g, r, mask, switched, unit in zip(*columns, strict=True):
            beyond = max(self.nnei - mask.shape[1], 0.0)
            at = Neighbors(mask[:, :, 0], switched[:, :, 0], unit, beyond)
            parts.append(r.transpose(1, 2) @ self.layers(g, at))
        return torch.cat(parts)[place]

    def pieces(self, count: Tensor) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        """Atoms in pieces of (atoms, n) with room for n neighbours each: place of each atom, its first row, the pieces.

        On a CPU those with the most neighbours come first, so that little room is left empty. A GPU takes all at once,
        with room for `sel`: it need not wait for the counts.
        """
        N, device = len(count), count.device
        if device.type != "cpu":
            place, n = torch.arange(N, device=device), int(self.nnei)
            return place, place * n, [(N, n)]
        counts, order = count.sort(descending=True, stable=True)
        sizes: list[tuple[int, int]] = []
        while (done := sum(atoms for atoms, _ in sizes)) < N:
            n = max(int(counts[done]), 1)
            sizes.append((min(max(ROWS // n, 1), N - done), n))
        sizes = sizes or [(0, 1)]
        room = torch.cat([torch.full((atoms,), n) for atoms, n in sizes])
        place = order.argsort()
        return place, (room.cumsum(0) - room)[place], sizes

    def layers(self, G: Tensor, at: Neighbors) -> Tensor:
        for layer in self.attention:
            G = layer(G, at)
        return G

    # ---- the same on the table, with derivatives written by hand

    def on_table(self, batch: Batch) -> bool:
        """Whether the table pays: its rows grow with the square of the number of types in the batch."""
        if self.table.grid is None:
            return False
        n = sum(count > 0 for count in batch.edges.type_counts)
        rows = self.table.K * (1 if self.nets.strip else n if self.config.type_one_side else n * n)
        return rows <= WORTH * len(batch.edges.i) or n <= 2

    def coefficients(self, center: Tensor, neighbor: Tensor) -> Tensor:
        """C (curves, K, M1): the curves of pairs of types as splines."""
        G = self.nets.curves(self.table.nodes, center, neighbor)  # (K, curves, M1)
        return self.table.to_coefficients(G).transpose(0, 1)

    def present(self, batch: Batch) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
        """Of the types that the batch has: atoms of each, place of each type among them, and the pairs they make."""
        types = tuple(t for t, count in enumerate(batch.edges.type_counts) if count) or (0,)
        if types not in self.known:
            device = batch.type.device
            group = torch.zeros(self.ntypes, dtype=torch.int64)
            group[list(types)] = torch.arange(len(types))
            centers = types[:1] if self.config.type_one_side else types
            a, b = torch.cartesian_prod(torch.tensor(centers, dtype=torch.int64), torch.tensor(types)).T
            self.known[types] = group.to(device), a.to(device), b.to(device)
        return tuple(batch.type_counts[t] for t in types), *self.known[types]

    def embed_table(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        terms = list(self.terms(batch, r))
        T = sum(TableSum.apply(C, g) for C, g in terms)
        if self.padded:
            T = T + self.empty_slots(batch) / self.nnei
        return T, lambda gT: sum(TablePull.apply(gT, C, g) for C, g in terms)

    def terms(self, batch: Batch, r: Tensor) -> Iterator[tuple[Tensor, Geometry]]:
        """The tables (centres, groups·K, M1) and geometries whose sums T is made of."""
        counts, group, a, b = self.present(batch)
        n = len(counts)
        C = self.coefficients(a, b) / self.nnei
        none = torch.zeros(n, dtype=torch.float64, device=r.device)
        if self.nets.strip_net is None:
            yield C.reshape(-1, n * self.table.K, self.M1), self.geometry(batch, r, counts, none, "R", group)
            return
        h = self.nets.strip_net(self.nets.of_pairs(a, b)).view(-1, n, 1, self.M1)  # (centres, n, 1, M1)
        if self.config.smooth:
            together = torch.zeros_like(group)
            yield C, self.geometry(batch, r, counts, none[:1], "R", together)
            yield (C * h).flatten(1, 2), self.geometry(batch, r, counts, none, "w R", group)
        else:
            yield (C + C * h).flatten(1, 2), self.geometry(batch, r, counts, none, "R", group)

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        c, nt = self.config, self.ntypes
        out = self.common_tree("dpa1", type_map)
        precision = out["precision"]
        names = ("neuron", "resnet_dt", "activation_function", "precision")
        settings = {"bias": True, **{name: out[name] for name in names}}
        flags = [c.trainable] * len(c.neuron)

        def nets(net: Net) -> dict[str, Any]:
            return collection([net], "embedding_network", 0, nt, settings, flags)

        shared = {
            "nnei": c.slots,
            "embed_dim": self.M1,
            "hidden_dim": c.attn,
            "dotr": c.attn_dotr,
            "do_mask": False,
            "scaling_factor": c.scaling_factor,
            "normalize": c.normalize,
            "temperature": c.temperature,
            "trainable_ln": c.trainable_ln,
            "ln_eps": 1e-5 if c.ln_eps is None else c.ln_eps,
            "precision": precision,
        }
        count = c.slots
        out |= {
            "ntypes": nt,
            "axis_neuron": c.axis_neuron,
            "tebd_dim": c.tebd_dim,
            "tebd_input_mode": "strip" if c.strip else "concat",
            "attn": c.attn,
            "attn_layer": c.attn_layer,
            "attn_dotr": c.attn_dotr,
            "attn_mask": False,
            "scaling_factor": c.scaling_factor,
            "normalize": c.normalize,
            "temperature": c.temperature,
            "trainable_ln": c.trainable_ln,
            "ln_eps": shared["ln_eps"],
            "smooth_type_embedding": c.smooth,
            "type_one_side": c.type_one_side,
            "concat_output_tebd": c.concat_output_tebd,
            "use_econf_tebd": False,
            "use_tebd_bias": c.use_tebd_bias,
            "embeddings": nets(self.nets.net),
            "attention_layers": {
                "@class": "NeighborGatedAttention",
                "@version": 1,
                "layer_num": c.attn_layer,
                **shared,
                "attention_layers": [layer.to_tree(shared, precision, c.trainable) for layer in self.attention],
            },
            "type_embedding": self.nets.types.to_tree(type_map, precision, c.trainable),
            "@variables": {"davg": slots(self.davg, count), "dstd": slots(self.dstd, count)},
        }
        if self.nets.strip_net is not None:
            out["embeddings_strip"] = nets(self.nets.strip_net)
        return out

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        refuse(tree, {"use_econf_tebd": False, "attn_mask": False, "lmax": 1, "compress": None}, source)
        out = super().section_from_tree(tree, source)
        # files of version 1 do not say whether the type embedding has a constant: it had
        out.setdefault("use_tebd_bias", tree["type_embedding"].get("use_tebd_bias", True))
        out["sel"] = sum(tree["sel"]) if isinstance(tree["sel"], list) else tree["sel"]
        return out

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        copy_nets([self.nets.net], tree["embeddings"]["networks"], f"{source}: embedding net")
        if self.nets.strip_net is not None:
            copy_nets([self.nets.strip_net], tree["embeddings_strip"]["networks"], f"{source}: strip net")
        self.nets.types.load_tree(tree["type_embedding"], source)
        found = tree["attention_layers"]["attention_layers"]
        if len(found) != len(self.attention):
            raise UserError(f"{source}: found {len(found)} attention layers, expected {len(self.attention)}.")
        for n, (layer, entry) in enumerate(zip(self.attention, found, strict=True)):
            layer.load_tree(entry, f"{source}: attention layer {n}")
        mean, std = tree["@variables"]["davg"], tree["@variables"]["dstd"]
        load_slots(self.davg, self.dstd, (mean, std), self.config.slots, source)

    def tree_from_pt(self, state: dict[str, Tensor], prefix: str, source: str) -> dict[str, Any]:
        part = f"{prefix}{self.pt_part}"
        out = super().tree_from_pt(state, prefix, source)
        if self.nets.strip_net is not None:
            out["embeddings_strip"] = {"networks": nets_from_pt(state, f"{part}.filter_layers_strip", source)}
        types = layer_from_pt(state, f"{prefix}.type_embedding.embedding.embedding_net.layers.0", source)
        layers = f"{part}.dpa1_attention.attention_layers"
        attention = [layer.tree_from_pt(state, f"{layers}.{n}", source) for n, layer in enumerate(self.attention)]
        return out | {
            "type_embedding": {"embedding": {"layers": [types]}},
            "attention_layers": {"attention_layers": attention},
        }


class SeAttenV2(SeAtten):
    """se_atten with strip and smooth."""

    Config = SeAttenV2Config

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        tree = super().to_tree(type_map) | {"type": "se_atten_v2"}
        return {k: v for k, v in tree.items() if k not in ("tebd_input_mode", "smooth_type_embedding")}
