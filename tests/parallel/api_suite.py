"""Run by every rank: what allforce.distributed promises to a model of one's own. Prints `passed` at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import allforce.distributed as ad
from allforce.errors import UserError

FOLDER = Path(sys.argv[1])


class Net(nn.Module):
    """Two branches, of which a batch may use one, and a layer that nobody uses."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.left, self.right, self.idle = (nn.Linear(4, 3, dtype=dtype) for _ in range(3))

    def forward(self, x, branch="both"):
        y = self.left(x) if branch != "right" else 0.0
        return y + self.right(x) if branch != "left" else y


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(net, step, rank, branch="both"):
    return net(data(step, rank), branch).pow(2).mean()


def serial(steps: int, branch=lambda rank: "both", micro: int = 1, clip: float | None = None) -> Net:
    """One worker that goes through the batches of all workers."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ad.size()):
            for k in range(micro):
                (loss_of(net, micro * step + k, rank, branch(rank)) / (ad.size() * micro)).backward()
        if clip:
            clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        schedule.step()
    return net


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-14) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() <= tolerance, (name, float((p - q).abs().max()))


def wrapped(net, rate=0.01, **how):
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # made before or after, it does not matter
    return ad.DistributedOptimizer(optimizer, net, **how), schedule


def test_steps_are_those_of_one_worker():
    net = Net(seed=ad.rank())
    optimizer, schedule = wrapped(net)
    ad.broadcast(net, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, step, ad.rank()).backward()
        optimizer.step()
        schedule.step()
    same(net, serial(5))
    assert net.idle.weight.grad is None  # as in a serial run: AdamW's decay leaves it alone
    assert torch.equal(net.idle.weight, Net().idle.weight)


def test_a_parameter_without_gradient_on_one_rank():
    net = Net()
    optimizer, schedule = wrapped(net)
    branch = lambda rank: "left" if rank == 0 else "right"  # noqa: E731
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(net, step, ad.rank(), branch(ad.rank())).backward()
        optimizer.step()
        schedule.step()
    same(net, serial(4, branch))


def test_a_rank_without_a_batch():
    net = Net()
    optimizer, _ = wrapped(net)
    if ad.rank() == 0:
        loss_of(net, 0, 0).backward()
    optimizer.step()
    one = Net()
    (loss_of(one, 0, 0) / ad.size()).backward()
    torch.optim.AdamW(one.parameters(), 0.01).step()
    same(net, one)


def test_accumulation():
    """By its number, by no_sync(), and without a word: the same steps; fewer collectives with the first two."""
    expected = serial(3, micro=2)
    for how in ("accumulate", "no_sync", "silent"):
        net = Net()
        optimizer, schedule = wrapped(net, accumulate=2 if how == "accumulate" else 1)
        calls = count_collectives(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            if how == "no_sync":
                with optimizer.no_sync():
                    (loss_of(net, 2 * step, ad.rank()) / 2).backward()
                (loss_of(net, 2 * step + 1, ad.rank()) / 2).backward()
            else:
                for k in range(2):
                    (loss_of(net, 2 * step + k, ad.rank()) / 2).backward()
            optimizer.step()
            schedule.step()
        same(net, expected)
        assert len(calls) == (6 if how == "silent" else 3), (how, len(calls))


def count_collectives(optimizer) -> list[int]:
    """The number of numbers of each all-reduce of this optimizer from now on."""
    averager, calls = optimizer.synchronize.__self__, []
    comm = averager.comm

    class Counting:
        rank, size, engine = comm.rank, comm.size, comm.engine

        def all_reduce_start(self, tensor):
            calls.append(tensor.numel())
            return comm.all_reduce_start(tensor)

    averager.comm = Counting()
    return calls


def test_one_collective_a_step():
    net = Net()
    optimizer, _ = wrapped(net)
    calls = count_collectives(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step, ad.rank()).backward()
        optimizer.step()
    assert calls == [3 * 15 + 6] * 4


def test_clipping():
    """Before the step, without a word to the optimizer, and in Horovod's way."""
    expected = serial(3, clip=0.05)
    for horovod in (False, True):
        net = Net()
        optimizer, schedule = wrapped(net)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step, ad.rank()).backward()
            if horovod:
                optimizer.synchronize()
            clip_grad_norm_(net.parameters(), 0.05)
            if horovod:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            schedule.step()
        same(net, expected)


def test_gradient_scaler():
    """An overflow on one rank is one everywhere: all leave the step out, all lower the scale."""
    net = Net(dtype=torch.float32)
    optimizer, _ = wrapped(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.clone() for p in net.parameters()]
    for step in range(4):
        optimizer.zero_grad()
        loss = net(data(step, ad.rank()).float()).pow(2).mean()
        if step == 0 and ad.rank() == ad.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert scaler.get_scale() == 512.0
    for p in net.parameters():
        assert all(torch.equal(p, q) for q in ad.gather(p)), "the workers differ"


def test_lbfgs_and_halves():
    """A closure is called several times a step; parameters of two precisions travel in one buffer."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, dtype=torch.bfloat16)).float()
    net[2].to(torch.bfloat16)
    ad.broadcast(net)
    optimizer = ad.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)
    net[2](net[1](net[0](data(0, ad.rank()).float())).bfloat16()).float().pow(2).mean().backward()
    assert net[2].weight.grad.dtype == torch.bfloat16 and net[0].weight.grad.dtype == torch.float32
    for p in net.parameters():
        assert all(torch.equal(p.grad, g) for g in ad.gather(p.grad))
    optimizer.step()
    line = Net()
    optimizer = ad.DistributedOptimizer(torch.optim.LBFGS(line.parameters(), 0.1, max_iter=3), line)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(line, 0, ad.rank())
        loss.backward()
        return ad.average(loss)

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_save_and_load():
    path = FOLDER / "net.safetensors"
    net = Net()
    optimizer, schedule = wrapped(net)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, step, ad.rank()).backward()
        optimizer.step()
        schedule.step()
    ad.save(path, net, optimizer, 2, schedule=schedule, note={"best": 0.5, "names": ("a", "b")})
    ad.barrier()
    assert [p.name for p in FOLDER.iterdir()] == ["net.safetensors"]
    other = Net(seed=5 + ad.rank())
    second, late = wrapped(other)
    told = ad.load(path, other, second, schedule=late)
    assert told == {"step": 2, "note": {"best": 0.5, "names": ("a", "b")}}
    same(other, net, 0)
    for step in range(2, 5):
        second.zero_grad()
        loss_of(other, step, ad.rank()).backward()
        second.step()
        late.step()
    same(other, serial(5))
    try:
        ad.load(FOLDER / "none")
    except UserError as error:
        assert "none: cannot be read" in str(error)
    else:
        raise AssertionError("a file that is not there was loaded")


def test_broadcast_of_values():
    value = ad.broadcast({"seed": 3, "list": [1.5, None, "x"]} if ad.rank() == 0 else None)
    assert value == {"seed": 3, "list": [1.5, None, "x"]}
    tensor = torch.full((3,), float(ad.rank()))
    assert ad.broadcast(tensor, root=1) is tensor and tensor.tolist() == [1.0] * 3


def test_figures():
    mean = (ad.size() - 1) / 2
    assert ad.average(ad.rank()) == mean and ad.all_reduce(ad.rank(), "sum") == mean * ad.size()
    figures = ad.average({"loss": torch.tensor(2.0 * ad.rank()), "more": [ad.rank(), torch.arange(2)]})
    assert figures["loss"].dtype == torch.float32 and float(figures["loss"]) == 2 * mean
    assert figures["more"][0] == mean and figures["more"][1].tolist() == [0.0, 1.0]
    assert ad.all_reduce(-ad.rank(), "max") == 0 and ad.all_reduce(ad.rank(), "max") == ad.size() - 1
    parts = ad.gather({"rank": ad.rank(), "tensor": torch.arange(ad.rank())})
    assert [p["rank"] for p in parts] == list(range(ad.size())) and [len(p["tensor"]) for p in parts] == list(
        range(ad.size())
    )


def everyone(batches) -> list:
    return [b for part in ad.gather([torch.as_tensor(b).tolist() for b in batches]) for b in part]


def test_shards():
    size = ad.size()
    numbers = list(range(4 * size + 1))
    taken = list(ad.shard(numbers))
    assert taken == numbers[ad.rank() : 4 * size : size] and len(ad.shard(numbers)) == 4
    assert list(ad.shard(iter(numbers))) == taken
    shuffled = ad.shard(numbers, seed=3)
    first, second = everyone(shuffled), everyone(shuffled)
    assert len(set(first)) == len(set(second)) == 4 * size and first != second
    again = ad.shard(numbers, seed=3)
    again.epoch = 1
    assert everyone(again) == second
    own = everyone(ad.shard(numbers, mode="replicate", seed=1))
    assert len(own) == 4 * size and own[:4] != own[4:8]
    torch.manual_seed(ad.rank())  # the workers' own generators do not matter
    loader = DataLoader(TensorDataset(torch.arange(12 * size)), batch_size=3, shuffle=True)
    batches = everyone(b[0] for b in ad.shard(loader))
    assert sorted(k for b in batches for k in b) == list(range(12 * size)) and batches[0] != [0, 1, 2]
    share = ad.shard(loader, mode="partition")
    mine = [k for (b,) in share for k in b.tolist()]
    assert sorted(mine) == list(range(12 * ad.rank(), 12 * ad.rank() + 12)) and len(share) == 4
    assert list(ad.shard(numbers, mode="partition")) == [numbers[k] for k in share_of(len(numbers))][:4]


def share_of(n: int) -> range:
    q, r = divmod(n, ad.size())
    start = ad.rank() * q + min(ad.rank(), r)
    return range(start, start + q + (ad.rank() < r))


def refused(words: str, action) -> None:
    try:
        action()
    except UserError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def test_mistakes():
    refused("disagree about the order", lambda: list(ad.shard(list(range(8 + 8 * ad.rank())))))
    refused("disagree about the parameters", lambda: wrapped(nn.Linear(2 + ad.rank(), 1)))
    refused("less than one batch", lambda: ad.shard([1]))
    refused("mode is 'all'", lambda: ad.shard([1, 2, 3], mode="all"))
    refused("needs data that can be counted", lambda: ad.shard(iter([1]), mode="partition"))
    table = nn.Embedding(4, 2, sparse=True)
    ad.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1), table)
    refused("gradient of weight is sparse", lambda: table(torch.tensor([1])).sum().backward())
    late = nn.Linear(2, 1)
    optimizer = ad.DistributedOptimizer(torch.optim.SGD(late.parameters(), 0.1), late)
    optimizer.add_param_group({"params": nn.Linear(2, 1).parameters()})
    refused("were added to the optimizer", optimizer.step)


def test_ddp():
    net = Net()
    if ad.gather("torch" if "torch" in sys.argv else "")[0] != "torch":
        refused("engine='torch'", lambda: ad.ddp(net))
        return
    parallel = ad.ddp(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    parallel(data(0, ad.rank())).pow(2).mean().backward()
    optimizer.step()
    same(net, serial(1), 1e-12)


if __name__ == "__main__":
    ad.init()
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            ad.barrier()
    workers = ad.size()
    first = ad.rank() == 0
    ad.shutdown()
    tasks = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert "pt_gloo_runloop" not in tasks, "a thread of the group that outlives it may abort the exit of the process"
    if first:
        print(f"passed: {workers} ranks")
