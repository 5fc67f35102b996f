"""Which worker takes which batches of a user's own data.

    global      one order, the same on all workers; worker r of W takes places r, r + W, …
    replicate   every worker draws from everything, in an order of its own
    partition   every worker has its own contiguous share, and touches nothing else

Every worker takes N div W of N batches an epoch: steps must not differ between workers. In a shuffled order those that
are left out are others every epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..errors import UserError
from .comm import Comm, partition
from .connect import agree

Mode = Literal["global", "replicate", "partition"]
COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
          "prefetch_factor", "pin_memory_device")  # fmt: skip


class Shard:
    """This worker's part of the data. Every iteration is an epoch; `epoch` may be set, to go on after a restart."""

    def __init__(self, comm: Comm, data: Iterable[Any], mode: Mode, seed: int | None):
        self.comm, self.data, self.mode, self.seed, self.epoch = comm, data, mode, seed, 0
        if mode not in ("global", "replicate", "partition"):
            raise UserError(f'shard: mode is {mode!r}. Expected "global", "replicate" or "partition"')
        self.loader = data if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset) else None
        self.stream = self.loader is None and not isinstance(data, Sequence)
        if self.stream and mode != "global":
            raise UserError(
                f"shard: mode {mode!r} needs data that can be counted and indexed (a list, a DataLoader of such a data"
                f' set), found {type(data).__name__}. Use mode "global"'
            )
        if not self.stream and len(self) == 0:
            raise UserError(
                f"shard: less than one batch for each of {comm.size} workers. Use fewer workers or more data"
            )

    def __len__(self) -> int:
        """Steps of an epoch: batches div workers."""
        if self.stream:
            raise TypeError("the length of this data is not known")
        if self.mode == "partition" and self.loader is not None:
            return len(_cut(self._samples(), self.loader))
        return len(self.data) // self.comm.size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.stream:
            return self._every_nth()
        batches, own = self._batches(), _number(self.seed or 0, self.epoch, self.comm.rank + 1)
        self.epoch += 1
        if self.loader is None:
            return (self.data[k] for k in batches)  # type: ignore[index]
        return iter(_reload(self.loader, batches, own))

    def _every_nth(self) -> Iterator[Any]:
        """Of each W items one; a last round that is not full is left out."""
        turn = []
        for item in self.data:
            turn.append(item)
            if len(turn) == self.comm.size:
                yield turn[self.comm.rank]
                turn.clear()

    def _batches(self) -> list[Any]:
        """Places in the list, or lists of indices of samples, that this worker takes in this epoch."""
        rank, size = self.comm.rank, self.comm.size
        own = rank + 1 if self.mode != "global" else 0
        with torch.random.fork_rng(devices=[]):  # samplers draw from torch's generator
            torch.manual_seed(_number(self.seed or 0, self.epoch, own))
            if self.mode == "partition":
                return self._share()
            everything = self._order()
            if self.mode == "replicate":
                everything = [everything[k] for k in torch.randperm(len(everything))]
        digest = hashlib.sha256(repr(everything).encode()).hexdigest()[:16] if self.mode == "global" else ""
        agree(self.comm, "the order of the batches", [len(everything), digest])
        first = rank if self.mode == "global" else 0
        step = size if self.mode == "global" else 1
        return everything[first : step * len(self) : step]

    def _order(self) -> list[Any]:
        if self.loader is not None:
            return list(self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler)
        count = len(self.data)  # type: ignore[arg-type]
        return torch.randperm(count).tolist() if self.seed is not None else list(range(count))

    def _share(self) -> list[Any]:
        """As many of my own share as every worker has, others every epoch where the order is random."""
        if self.loader is not None:
            return _cut(self._samples(), self.loader)
        indices = partition(range(len(self.data)), self.comm.rank, self.comm.size)  # type: ignore[arg-type]
        order = torch.randperm(len(indices)).tolist() if self.seed is not None else range(len(indices))
        return [indices[k] for k in order][: len(self)]

    def _samples(self) -> list[int]:
        assert self.loader is not None
        sampler, count = self.loader.sampler, len(self.loader.dataset)  # type: ignore[arg-type]
        if type(sampler) not in (RandomSampler, SequentialSampler) or self.loader.batch_size is None:
            raise UserError(
                'shard: mode "partition" of a DataLoader needs its own batches, shuffled or in order; this one has a'
                f' {type(sampler).__name__} of its own. Use mode "global"'
            )
        indices = partition(range(count), self.comm.rank, self.comm.size)
        shuffled = isinstance(sampler, RandomSampler)
        order = torch.randperm(len(indices)).tolist() if shuffled else range(len(indices))
        return [indices[k] for k in order][: count // self.comm.size]


def _cut(samples: list[int], loader: DataLoader) -> list[list[int]]:
    """Batches as the loader makes them."""
    size = loader.batch_size or 1
    batches = [samples[k : k + size] for k in range(0, len(samples), size)]
    return batches[:-1] if loader.drop_last and batches and len(batches[-1]) < size else batches


def _reload(loader: DataLoader, batches: list[Any], seed: int) -> DataLoader:
    """A loader like the one given, for these batches; `seed` is that of its worker processes."""
    how = {name: getattr(loader, name) for name in COPIED}
    how["generator"] = torch.Generator().manual_seed(seed)
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=batches, **how)
    return DataLoader(loader.dataset, batch_sampler=batches, **how)


def _number(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
