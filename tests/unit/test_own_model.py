"""allforce.distributed in one process: nothing is sent, and the files are safe."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import allforce.distributed as ad
from allforce.distributed import API, api
from allforce.distributed.trees import pack, read_tree, unpack, write_tree
from allforce.errors import UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("ALLFORCE_LAUNCHER", "none")
    threads = torch.get_num_threads()
    yield
    ad.shutdown()
    torch.set_num_threads(threads)


def test_names():
    assert set(api.__all__) == API and all(callable(getattr(ad, name)) for name in API)
    with pytest.raises(AttributeError, match="no attribute 'allreduce'"):
        ad.allreduce  # noqa: B018


def test_the_comm_protocol_alone_is_cheap():
    code = "import sys, allforce.distributed.comm; print([m for m in sys.modules if 'allforce.distributed.' in m])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['allforce.distributed.comm']"


@pytest.mark.parametrize("line", ["ad.init(engine='telepathy')", "ad.init(); ad.load('none', torch.nn.Linear(1, 1))"])
def test_a_program_ends_with_one_paragraph(line):
    code = f"import torch\nimport allforce.distributed as ad\n{line}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "line 3: " in result.stderr and len(result.stderr.splitlines()) == 1


def test_serial():
    ad.init()
    assert (ad.rank(), ad.size(), ad.local_rank(), ad.local_size()) == (0, 1, 0, 1)
    assert ad.scale_lr(0.1) == 0.1 and ad.average({"a": 2}) == {"a": 2.0} and ad.gather("x") == ["x"]
    assert list(ad.shard([1, 2, 3])) == [1, 2, 3] and len(ad.shard([1, 2, 3])) == 3
    net = torch.nn.Linear(2, 1)
    assert ad.ddp(net) is net and ad.broadcast(net) is net
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    assert ad.DistributedOptimizer(optimizer, net) is optimizer
    net(torch.ones(1, 2)).sum().backward()
    with optimizer.no_sync():
        optimizer.step()
    optimizer.synchronize()
    ad.barrier()


def test_shuffled_epochs_of_a_loader():
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    shard, state = ad.shard(loader, seed=1), torch.random.get_rng_state()
    epochs = [[b[0].tolist() for b in shard] for _ in range(2)]
    assert epochs[0] != epochs[1] and all(sorted(sum(e, [])) == list(range(10)) for e in epochs)
    again = ad.shard(loader, seed=1)
    assert [b[0].tolist() for b in again] == epochs[0]
    assert torch.equal(torch.random.get_rng_state(), state)  # the user's generator is left alone
    single = torch.utils.data.DataLoader(data, batch_size=None)
    assert [int(b[0]) for b in ad.shard(single)] == list(range(10))


STATES = {
    "nested": {"a": [1, 2.5, None, True, "x"], "b": (1, (2,)), 3: {"c": torch.arange(3)}},
    "SGD": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9).state_dict(),
}


@pytest.mark.parametrize("name", STATES)
def test_trees(name, tmp_path):
    tensors: list[torch.Tensor] = []
    tree = pack(STATES[name], tensors)
    assert repr(unpack(tree, tensors)) == repr(STATES[name])
    write_tree(tmp_path / "a", STATES[name])
    assert repr(read_tree(tmp_path / "a")) == repr(STATES[name])


@pytest.mark.parametrize("schedule", ["MultiStepLR", "OneCycleLR", "CosineAnnealingLR"])
def test_optimizers_and_schedulers_come_back(schedule, tmp_path):
    def make():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(net.parameters(), 0.1, amsgrad=True)
        kinds = torch.optim.lr_scheduler
        made = {
            "MultiStepLR": lambda: kinds.MultiStepLR(optimizer, [2, 4]),
            "OneCycleLR": lambda: kinds.OneCycleLR(optimizer, 0.2, total_steps=9),
            "CosineAnnealingLR": lambda: kinds.CosineAnnealingLR(optimizer, 9),
        }
        return net, optimizer, made[schedule]()

    def go(net, optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.ones(1, 3)).pow(2).sum().backward()
            optimizer.step()
            scheduler.step()

    whole, half = make(), make()
    go(*whole, 6)
    go(*half, 3)
    ad.save(tmp_path / "x.safetensors", half[0], half[1], 3, schedule=half[2])
    other = make()
    assert ad.load(tmp_path / "x.safetensors", other[0], other[1], schedule=other[2]) == {"step": 3}
    go(*other, 3)
    assert torch.equal(other[0].weight, whole[0].weight) and other[2].get_last_lr() == whole[2].get_last_lr()


def test_files(tmp_path):
    net = torch.nn.Linear(2, 1)
    ad.save(tmp_path / "a.safetensors", net)
    assert len(load_file(tmp_path / "a.safetensors")) == 2  # any safetensors reader opens it
    with pytest.raises(UserError, match="has no optimizer; it has model, step"):
        ad.load(tmp_path / "a.safetensors", net, torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(UserError, match="does not fit this Linear"):
        ad.load(tmp_path / "a.safetensors", torch.nn.Linear(3, 1))
    with pytest.raises(UserError, match="state/thing is a set"):
        ad.save(tmp_path / "b.safetensors", net, thing={1})
    assert not (tmp_path / "b.safetensors").exists()
    whole = (tmp_path / "a.safetensors").read_bytes()
    for damaged in (whole[:50], whole[:-3], b"", b"PK\x03\x04" + whole):
        (tmp_path / "c.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            ad.load(tmp_path / "c.safetensors", net)
