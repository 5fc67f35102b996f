"""The whole proof of docs/reliability.md with real processes, kills, disks and links: `make faults`.

    python tests/faults/full.py [--scale 0.1] [--only kills,stops] [--seed 1]

Every experiment prints one row: what, how many, how many failed, what was measured. Any failure: exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from run import ROOT, Run

sys.path.insert(0, str(ROOT / "tests/parallel"))
import listeners  # noqa: E402
from conftest import missing  # noqa: E402
from test_two_hosts import Hosts  # noqa: E402

from allforce.distributed.launch import scrubbed  # noqa: E402
from allforce.distributed.network import is_loopback  # noqa: E402
from allforce.errors import UserError  # noqa: E402
from allforce.files import checkpoint  # noqa: E402
from allforce.files.checkpoint import Checkpoint  # noqa: E402

STEPS = {"training__numb_steps": 400, "training__disp_freq": 10, "training__save_freq": 50, "training__seed": 3}
LAUNCHERS = [x for x in ("workers", "torchrun", "hydra", "openmpi", "horovodrun") if not missing(x)]
ENVIRONMENT = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Outcome:
    count: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""

    def check(self, good: bool, what: str) -> None:
        self.count += 1
        if not good:
            self.failures.append(what)
            print(f"    FAILED: {what}", flush=True)


@contextmanager
def scratch():
    folder = Path(tempfile.mkdtemp(prefix="allforce-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def same(a: Path, b: Path) -> bool:
    """The end of two runs, byte for byte."""
    last = f"model.ckpt-{STEPS['training__numb_steps']}.safetensors"
    if (a / "lcurve.out").read_bytes() != (b / "lcurve.out").read_bytes():
        return False
    one, two = checkpoint.read(a / last).tensors, checkpoint.read(b / last).tensors
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# ---- workers


def kills(count: int, draw: random.Random) -> Outcome:
    """A random rank or the launcher at a random moment; every second run is then taken to its end."""
    result, resumed, ended, opened = Outcome(), 0, [], 0
    with scratch() as reference:
        begun = time.monotonic()
        with Run(reference, "workers", 2, **STEPS) as run:
            assert run.wait()[0] == 0, run.text()
        usual = time.monotonic() - begun
        for number in range(count):
            resume = number % 2 == 0
            launcher, ranks = draw.choice(LAUNCHERS), 2 if resume else draw.randint(2, 4)
            with scratch() as folder:
                who, seconds, open_ = one_kill(folder, launcher, ranks, draw, draw.uniform(0.3, usual))
                result.check(seconds is not None, f"kill {number}: {who} under {launcher}, {ranks} ranks: some live on")
                ended += [] if seconds is None else [seconds]
                opened += open_
                if resume:
                    with Run(folder, launcher, 2, "--restart", "auto", data=False) as run:
                        code, text = run.wait()
                    resumed += 1
                    result.check(
                        code == 0 and same(reference, folder), f"kill {number} of {who}: not resumed: {text[-500:]}"
                    )
    result.check(opened == 0, f"{opened} listeners of --workers were reached from outside")
    slowest = f"{statistics.median(ended):.1f} s in the middle, {max(ended):.1f} s at most" if ended else ""
    result.note = f"all processes had ended after {slowest}; {resumed} resumed to a byte-identical end"
    return result


def one_kill(folder: Path, launcher: str, ranks: int, draw: random.Random, after: float):
    """(whom, seconds until all had ended or None, listeners reached from outside)"""
    open_ = 0
    with Run(folder, launcher, ranks, **STEPS) as run:
        deadline = time.monotonic() + after
        while time.monotonic() < deadline and run.process.poll() is None:
            run.tree()
            if launcher == "workers":
                open_ += sum(not is_loopback(s.ip) for s in listeners.look(run.process.pid))
            time.sleep(0.05)
        workers = run.ranks()
        victims = [*workers, "the launcher"]
        who = draw.choice(victims)
        try:
            (run.process if who == "the launcher" else workers[who]).kill()
        except psutil.NoSuchProcess:
            pass
        begun = time.monotonic()
        while time.monotonic() < begun + 30:
            if not run.tree() and run.process.poll() is not None:
                return f"rank {who}" if isinstance(who, int) else who, time.monotonic() - begun, open_
            time.sleep(0.02)
        return str(who), None, open_


def stops(count: int, draw: random.Random) -> Outcome:
    """Pauses of a random rank: shorter than the limit nothing happens, longer the others end."""
    result, given_up = Outcome(), max(1, count // 10)
    endless = {**STEPS, "training__numb_steps": 10_000_000, "training__distributed_timeout": 4}
    with scratch() as folder, Run(folder, "workers", 3, **endless) as run:
        run.wait_for("Batch      40")
        for number in range(count - given_up):
            rank = draw.randrange(3)
            run.kill(rank, signal.SIGSTOP)
            time.sleep(draw.uniform(0.2, 2.0))
            run.kill(rank, signal.SIGCONT)
            time.sleep(0.3)
            result.check(run.process.poll() is None, f"stop {number}: the run has ended: {run.text()[-500:]}")
            if run.process.poll() is not None:
                return result
    times = []
    for number in range(given_up):
        with scratch() as folder, Run(folder, "workers", 2, **endless) as run:
            run.wait_for("Batch      40")
            run.kill(rank := draw.randrange(2), signal.SIGSTOP)
            begun = time.monotonic()
            code, text = run.wait(40)
            times.append(time.monotonic() - begun)
            good = code == 75 and f"rank {rank} (process" in text and "has given no sign of life" in text
            result.check(good, f"stop {number} of rank {rank} for ever: {text[-500:]}")
    result.note = f"of them {given_up} for ever: ended after {max(times):.1f} s at most, limit 4 s"
    return result


LOOP = """
import sys, time, torch
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
comm = join(detect())
comm.watch.limit = 4.0
print("ready", flush=True)
while True:
    comm.all_reduce(torch.ones(1000))
    time.sleep(0.01)
"""


def cuts(count: int, draw: random.Random) -> Outcome:
    """Two hosts whose link is cut: both ends notice within the limit."""
    result, times = Outcome(), []
    with scratch() as folder:
        hosts = Hosts(folder)
        try:
            hosts.up()
            for number in range(count):
                seconds = one_cut(hosts, number, draw)
                times += [] if seconds is None else [seconds]
                result.check(seconds is not None, f"cut {number}: a worker lives on after 20 s")
        finally:
            hosts.down()
    result.note = f"both ends had ended after {max(times, default=0):.1f} s at most, limit 4 s"
    return result


def one_cut(hosts: Hosts, number: int, draw: random.Random) -> float | None:
    job = {"ALLFORCE_SIZE": "2", "ALLFORCE_LOCAL_RANK": "0", "ALLFORCE_LOCAL_SIZE": "1"}
    job |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(29600 + number)}
    workers = [
        subprocess.Popen(
            hosts.inside(rank, sys.executable, "-c", LOOP),
            env=ENVIRONMENT | job | {"ALLFORCE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.1, 1.0))
        hosts.run("-n", hosts.names[0], "link", "set", "af0", "down")
        begun = time.monotonic()
        while any(worker.poll() is None for worker in workers):
            if time.monotonic() > begun + 20:
                return None
            time.sleep(0.05)
        return time.monotonic() - begun
    finally:
        hosts.run("-n", hosts.names[0], "link", "set", "af0", "up")
        for worker in workers:
            worker.kill()
            worker.wait()


# ---- checkpoints


def state(step: int) -> Checkpoint:
    torch.manual_seed(step)
    return Checkpoint({f"model/{k}": torch.randn(40, 50) for k in range(4)}, {"step": step, "model": {}, "run": "r"})


def writer(count: int, draw: random.Random) -> Outcome:
    """Kills of the writer at a random byte of the file: the newest intact one is the old or the new, whole."""
    result = Outcome()
    with scratch() as folder:
        prefix, size = folder / "model.ckpt", len(checkpoint.encode(state(1)))
        checkpoint.save(prefix, state(1), 3)
        newest, whole = 1, 0
        for step in range(2, count + 2):
            limit = draw.randrange(1, size * 5 // 4)
            pid = os.fork()
            if pid == 0:  # the kernel ends it when the file would grow beyond the limit
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                checkpoint.save(prefix, state(step), 3)
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            whole += status == 0
            wanted = step if status == 0 else newest
            found = checkpoint.read(checkpoint.find(prefix))
            result.check(found.step == wanted, f"killed at step {step}: found {found.step}, not {wanted}")
            newest = found.step
            if step % 100 == 0:
                checkpoint.sweep(prefix)
        checkpoint.sweep(prefix)
        result.check(not list(folder.glob(".*")), f"left behind: {list(folder.glob('.*'))}")
    result.note = f"{count - whole} were killed, {whole} came to their end"
    return result


def calls(count: int, draw: random.Random) -> Outcome:
    """A kill at every system call of a save, one after the other, by strace."""
    result = Outcome()
    with scratch() as folder:
        prefix = folder / "model.ckpt"
        checkpoint.save(prefix, state(1), 2)
        save_traced(prefix, 2, "-o", str(folder / "trace"), "-e", "trace=all")
        made = re.findall(r"^(?:\d+ +)?([a-z]\w*)\(", (folder / "trace").read_text(), re.MULTILINE)
        newest, killed = 2, 0
        for step, call in enumerate(made, start=3):
            which = made[: step - 2].count(call)  # strace counts each kind of call by itself
            rule = f"inject={call}:signal=KILL:when={which}"
            whole = save_traced(prefix, step, "-o", "/dev/null", "-e", rule)
            killed += not whole
            found = checkpoint.read(checkpoint.find(prefix))
            wanted = (step,) if whole else (newest, step)
            result.check(found.step in wanted, f"killed at call {which} of {call}: found step {found.step}")
            newest = found.step
    result.note = f"{len(made)} system calls in a save, {killed} of the kills met it"
    return result


def save_traced(prefix: Path, step: int, *options: str) -> bool:
    """A save under strace; whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        ready = state(step)
        os.kill(os.getpid(), signal.SIGSTOP)
        checkpoint.save(prefix, ready, 2)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    tracer = subprocess.Popen(["strace", "-f", "-qq", *options, "-p", str(pid)])
    while f"TracerPid:\t{tracer.pid}" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.002)
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    while os.WIFSTOPPED(status):
        _, status = os.waitpid(pid, 0)
    tracer.wait()
    return status == 0


def disks(count: int, draw: random.Random) -> Outcome:
    """Disks of all sizes that fill up: every write succeeds or leaves the older state intact."""
    result, full = Outcome(), 0
    size = len(checkpoint.encode(state(1)))
    for number in range(count):
        with scratch() as folder:
            kilobytes = 4 * (1 + number * 5 * size // 4096 // count)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
            try:
                newest = 0
                for step in range(1, 6):
                    try:
                        checkpoint.save(folder / "model.ckpt", state(step), 3)
                        newest = step
                    except OSError as error:
                        full += 1
                        good = "bytes needed" in str(error) and "No space left" in str(error)
                        result.check(good, f"{kilobytes} kB: {error}")
                found = checkpoint.read(checkpoint.find(folder / "model.ckpt")).step if newest else 0
                result.check(found >= newest, f"{kilobytes} kB: found step {found}, written {newest}")
            finally:
                subprocess.run(["umount", folder], check=True)
    result.note = f"{full} writes met a full disk"
    return result


def corruptions(count: int, draw: random.Random) -> Outcome:
    """A checkpoint with wrong, missing or additional bytes: always noticed."""
    result = Outcome()
    with scratch() as folder:
        whole, path = checkpoint.encode(state(7)), folder / "model.ckpt-7.safetensors"
        for number in range(count):
            data, kind = bytearray(whole), number % 4
            at = draw.randrange(len(data))
            if kind == 0:
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del data[at:]
            elif kind == 2:
                data[at : at + 512] = bytes(len(data[at : at + 512]))
            else:
                data[at:at] = draw.randbytes(draw.randrange(1, 64))
            if data == whole:  # zeros where zeros were
                data[at] ^= 1
            path.write_bytes(data)
            try:
                checkpoint.read(path)
                result.check(False, f"corruption {number} at byte {at} was not noticed")
            except UserError:
                result.check(True, "")
    return result


# ---- files


def mutations(count: int, draw: random.Random) -> Outcome:
    """test_mutations.py with many examples."""
    numbers = [count, max(10, count // 10), max(10, count * 3 // 200)]
    env = os.environ | {"ALLFORCE_MUTATIONS": ",".join(map(str, numbers)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).with_name("test_mutations.py"))]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    result = Outcome(sum(numbers))
    if done.returncode:
        result.failures.append(done.stdout[-3000:])
        print(done.stdout[-3000:], flush=True)
    result.note = f"{numbers[0]} inputs, {numbers[1]} data sets, {numbers[2]} model files"
    return result


# ---- all together


def chaos(seconds: int, draw: random.Random) -> Outcome:
    """A fault every 10 s; the run restarts itself, or is started again, and ends as if nothing had happened."""
    result, faults, lost, computed = Outcome(), 0, 0, 0
    plan = {**STEPS, "training__numb_steps": 90 * seconds}
    last = plan["training__numb_steps"]
    with scratch() as reference, scratch() as folder:
        with Run(reference, "workers", 2, **plan) as run:
            assert run.wait(10 * seconds)[0] == 0, run.text()
        args, data, begun = (), True, time.monotonic()
        while True:
            with Run(folder, "workers", 2, "--max-restarts", "1000", *args, data=data, **plan) as run:
                faults += disturb(run, draw, begun + seconds)
                code, text = run.wait(20 * seconds)
            args, data = ("--restart", "auto"), False
            if code == 0:
                break
            if time.monotonic() > begun + 20 * seconds:
                result.check(False, f"no end: {text[-500:]}")
                break
        lost, computed = goodput(text, last)
        files = [(p / f"model.ckpt-{last}.safetensors") for p in (reference, folder)]
        one, two = (checkpoint.read(p).tensors for p in files)
        equal = (reference / "lcurve.out").read_bytes() == (folder / "lcurve.out").read_bytes()
        result.check(equal and all(torch.equal(one[k], two[k]) for k in one), "the end is another one")
        share = 100 * (1 - lost / computed)
        result.check(share > 90, f"goodput {share:.1f} %")
        result.note = f"{faults} faults in {seconds} s; {share:.1f} % of all steps computed are in the result"
    return result


def disturb(run: Run, draw: random.Random, end: float) -> int:
    """One fault every 10 s until the time is over, the run has ended, or its launcher was the victim."""
    faults = 0
    while time.monotonic() < end:
        for _ in range(100):
            run.tree()
            if run.process.poll() is not None:
                return faults
            time.sleep(0.1)
        what, ranks = draw.choice(["kill", "kill", "stop", "launcher"]), run.ranks()
        faults += 1
        try:
            if what == "launcher":
                run.process.kill()
                return faults
            victim = draw.choice(list(ranks.values()))
            victim.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            if what == "stop":
                time.sleep(2)
                victim.send_signal(signal.SIGCONT)
        except (psutil.Error, IndexError):
            continue
    return faults


def goodput(text: str, last: int) -> tuple[int, int]:
    """(steps that were computed in vain, all), to the nearest line of the log."""
    lost, at = 0, 0
    for line in text.splitlines():
        if "Continue at step" in line:
            lost += max(0, at - int(line.split("Continue at step")[1].split()[0]))
        elif "Start to train" in line:
            lost, at = lost + at, 0
        elif "Batch " in line and ": trn:" in line:
            at = int(line.split("Batch ")[1].split(":")[0])
    return lost, last + lost


EXPERIMENTS: dict[str, tuple[Callable[[int, random.Random], Outcome], int]] = {
    "corruptions": (corruptions, 5000),
    "writer": (writer, 10_000),
    "calls": (calls, 1),
    "disks": (disks, 64),
    "mutations": (mutations, 20_000),
    "stops": (stops, 50),
    "cuts": (cuts, 20),
    "kills": (kills, 200),
    "chaos": (chaos, 480),
}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=",".join(EXPERIMENTS), help="names with commas between")
    p.add_argument("--scale", type=float, default=1.0, help="part of all counts")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    failed = 0
    print("| experiment | count | failures | seconds | |\n|---|---|---|---|---|", flush=True)
    for name in args.only.split(","):
        run, count = EXPERIMENTS[name]
        begun = time.monotonic()
        try:
            outcome = run(max(2, round(count * args.scale)), random.Random(f"{args.seed} {name}"))
        except (FileNotFoundError, subprocess.CalledProcessError) as error:  # no strace, mount or ip, or no right to it
            outcome = Outcome(note=f"not tried: {error}")
        failed += len(outcome.failures)
        seconds = time.monotonic() - begun
        print(f"| {name} | {outcome.count} | {len(outcome.failures)} | {seconds:.0f} | {outcome.note} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
