"""One rank of a job meets with an accident: misfortune.py WHAT. Run by test_start_failures.py under a launcher."""

import os
import signal
import sys
import time

import torch

from allforce.distributed.comm import LostContact
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
from allforce.distributed.spawn import report
from allforce.errors import UserError


def main(what: str) -> None:
    world = detect()
    if what == "dies before" and world.rank == 1:
        os._exit(3)
    comm = join(world, os.environ.get("ENGINE", "auto"))
    if what == "is killed":
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(100):
            comm.all_reduce(torch.zeros(1000))
            time.sleep(0.1)
    if what == "gives up":
        if comm.rank == 1:
            comm.abort(7)
        time.sleep(100)  # the others are busy and look at nothing
    if what == "has a wrong input":
        raise UserError("training/numb_steps is -1, expected 1 or more")
    if what == "sleeps":
        os.write(1, b"asleep\n")  # in one piece, also where the launcher made stdout unbuffered
        time.sleep(100)
    print("unharmed", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except LostContact:
        time.sleep(3)  # the watch names the dead and ends this process
        os._exit(1)
    except UserError as error:
        if not report(str(error)):
            print(f"ERROR {error}", file=sys.stderr, flush=True)
        os._exit(2)
