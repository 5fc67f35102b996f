"""The workers of a job: how they were started (launch), how they meet (connect), how they sum (Comm).

For a model of one's own (api.py, docs/from_horovod.md):

    import allforce.distributed as ad

    ad.init()                                                        # any launcher, or none
    model = Net().to(ad.device())                                    # one GPU for each local rank
    optimizer = torch.optim.Adam(model.parameters(), ad.scale_lr(1e-3))
    optimizer = ad.DistributedOptimizer(optimizer, model)            # gradients are means over all workers
    ad.broadcast(model, optimizer)                                   # all begin like rank 0
    for step, batch in enumerate(ad.shard(loader)):                  # every worker its part of one order
        ...
    ad.save("net.safetensors", model, optimizer, step)               # rank 0 writes, whole or not at all
    ad.average(loss)                                                 # mean over the workers
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403

ENGINES = ("auto", "torch", "mpi", "horovod", "serial")  # what carries data between workers
API = frozenset(
    "DistributedOptimizer all_reduce average barrier broadcast ddp device gather init load local_rank local_size rank "
    "save scale_lr shard shutdown size".split()
)


def __getattr__(name: str) -> Any:
    """What api.py has, on first use: importing `allforce.distributed.comm` alone stays cheap."""
    if name not in API:
        raise AttributeError(f"module 'allforce.distributed' has no attribute {name!r}")
    return getattr(import_module(".api", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *API})
