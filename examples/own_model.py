"""Train a model of one's own on many workers, with allforce.distributed: a classifier of small images.

    python own_model.py                                      one worker
    torchrun --nproc-per-node=4 own_model.py                 four, and so with any other launcher:
    mpirun -np 4 python own_model.py
    python own_model.py --accumulate 4 --workers-like 4      one worker doing the work of four: the same result

The images are made in place: ten patterns, each shifted, scaled and in noise.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import allforce.distributed as ad

CLASSES, SIDE = 10, 28


def images(count: int, seed: int) -> TensorDataset:
    """(count, 1, 28, 28) images and (count,) classes."""
    patterns = torch.randn(CLASSES, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, SIDE, mode="bicubic")
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=draw)
    shifts = torch.randint(-3, 4, (count, 2), generator=draw)
    shifted = [torch.roll(patterns[c], tuple(s), (1, 2)) for c, s in zip(classes, shifts.tolist(), strict=True)]
    scale = 0.5 + torch.rand(count, 1, 1, 1, generator=draw)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=draw)
    return TensorDataset(scale * torch.stack(shifted) + noise, classes)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 6 * 6, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--images", type=int, default=4096)
    arguments.add_argument("--accumulate", type=int, default=1, help="batches of each worker that make one step")
    arguments.add_argument("--workers-like", type=int, default=0, help="the learning rate of so many workers")
    arguments.add_argument("--checkpoint", default="own_model.safetensors")
    arguments.add_argument("--restart", action="store_true", help="go on from the checkpoint")
    args = arguments.parse_args()

    # 1. Join the workers. 2. One GPU for each of a machine, or a share of its cores.
    ad.init()
    device = ad.device()

    # 3. The learning rate follows the number of workers. 4. Gradients become means over all of them.
    torch.manual_seed(ad.rank())
    model = network().to(device)
    rate = 5e-4 * args.workers_like if args.workers_like else ad.scale_lr(5e-4)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    optimizer = ad.DistributedOptimizer(optimizer, model, accumulate=args.accumulate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    # 5. All begin like rank 0, or like the checkpoint.
    done = 0
    if args.restart:
        done = ad.load(args.checkpoint, model, optimizer, schedule=schedule)["step"]
    else:
        ad.broadcast(model, optimizer)

    # 6. Every worker takes its part of one order of batches.
    batches = ad.shard(DataLoader(images(args.images, seed=1), batch_size=32, shuffle=True), seed=7)
    held_back = ad.shard(DataLoader(images(1024, seed=2), batch_size=128))

    for epoch in range(done, args.epochs):
        batches.epoch = epoch
        model.train()
        for number, (x, classes) in enumerate(batches):
            loss = cross_entropy(model(x.to(device)), classes.to(device)) / args.accumulate
            loss.backward()
            if (number + 1) % args.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()

        # 7. Rank 0 writes the checkpoint. 8. Figures are means over the workers.
        ad.save(args.checkpoint, model, optimizer, epoch + 1, schedule=schedule)
        model.eval()
        with torch.no_grad():
            guesses = [(model(x.to(device)).argmax(1) == c.to(device)).double().mean() for x, c in held_back]
        right = ad.average(torch.stack(guesses).mean())
        loss_of_all = ad.average(loss.detach() * args.accumulate)
        if ad.rank() == 0:
            print(f"epoch {epoch + 1}: loss of the last batches {loss_of_all:.4f}, held back {100 * right:.1f} % right")


if __name__ == "__main__":
    main()
