"""hybrid: the common suite over mixtures, and parts with cutoffs and slots of their own."""

from __future__ import annotations

import pytest
import torch
from make import small_model
from suite import ModelSuite, batch_of, evaluate, structure

from allforce.models.hybrid import within

PARTS = [{"type": "se_e2_a"}, {"type": "se_e2_r", "rcut": 3.0, "sel": [12, 12], "type_one_side": True}]


class TestTwo(ModelSuite):
    make = staticmethod(lambda: small_model({"type": "hybrid", "list": PARTS}))


class TestMixedTypes(ModelSuite):
    """With se_atten one fitting net serves all types."""

    make = staticmethod(
        lambda: small_model({"type": "hybrid", "list": [{"type": "se_atten_v2"}, PARTS[0] | {"rcut": 3.2}]})
    )


@pytest.mark.parametrize("kind", ["se_e2_a", "se_e2_r"])
def test_a_part_sees_what_it_would_see_alone(kind):
    """Also where its cutoff is shorter than that of another part, or its slots are fewer than the neighbours."""
    few = {"type": kind, "rcut": 3.5, "sel": [5, 6]}
    hybrid = small_model({"type": "hybrid", "list": [few, {"type": "se_e2_a", "seed": 3}]})
    alone = small_model(few)
    alone.descriptor.load_state_dict(hybrid.descriptor.members[0].state_dict())
    frame = structure(0, 12)
    a = evaluate(hybrid, frame, wanted=("descriptor",)).descriptor
    b = evaluate(alone, frame, wanted=("descriptor",)).descriptor
    torch.testing.assert_close(a[:, : b.shape[1]], b, rtol=0, atol=1e-12)


def test_within_keeps_the_nearest():
    model = small_model({"type": "hybrid", "list": [{"type": "se_e2_a"}, {"type": "se_e2_a", "sel": [3, 2]}]})
    batch = batch_of(model, structure(0, 10))
    keep = within(batch, batch.edges.r, model.descriptor.members[1].limit, 2)
    d = torch.linalg.vector_norm(batch.edges.r, dim=1)
    for i in range(10):
        for t, most in ((0, 3), (1, 2)):
            of_group = (batch.edges.i == i) & (batch.type[batch.edges.j] == t)
            assert int((keep & of_group).sum()) == min(most, int(of_group.sum()))
            if (of_group & ~keep).any():
                assert d[keep & of_group].max() <= d[of_group & ~keep].min()
