"""The whole proof of docs/reliability.md with real processes, kills, disks and links: `make faults`.

    python tests/faults/full.py [--scale 0.1] [--only kills,stops] [--seed 1]

Every experiment prints one row: what, how many, how many failed, what was measured. Any failure: exit code 1. Without
--only they run side by side: on every core one that computes, and one more that mostly waits.
"""

from __future__ import annotations

import argparse
import json
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
import traceback
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from run import ROOT, Run, slurm_cluster

sys.path.insert(0, str(ROOT / "tests/parallel"))
import listeners  # noqa: E402
from conftest import missing  # noqa: E402
from test_two_hosts import Hosts  # noqa: E402

from allforce.distributed.launch import scrubbed  # noqa: E402
from allforce.distributed.network import is_loopback  # noqa: E402
from allforce.errors import UserError  # noqa: E402
from allforce.files import checkpoint  # noqa: E402
from allforce.files.checkpoint import Checkpoint  # noqa: E402

HERE = Path(__file__).parent
STEPS = {"training__numb_steps": 100, "training__disp_freq": 5, "training__save_freq": 10, "training__seed": 3}
ENVIRONMENT = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SINGLE = {"ALLFORCE_SHARED_MEMORY": "0"}  # gradients through gloo instead


@dataclass
class Outcome:
    count: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""

    def check(self, good: bool, what: str) -> None:
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


def same(a: Path, b: Path, step: int = STEPS["training__numb_steps"]) -> bool:
    """The end of two runs, byte for byte."""
    last = f"model.ckpt-{step}.safetensors"
    if (a / "lcurve.out").read_bytes() != (b / "lcurve.out").read_bytes():
        return False
    one, two = checkpoint.read(a / last).tensors, checkpoint.read(b / last).tensors
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# ---- workers


class Doors:
    """Listeners of our own that others than this host reach, over all runs that are looked at."""

    def __init__(self) -> None:
        self.runs, self.looks, self.open = 0, 0, set[listeners.Listener]()

    def look(self, run: Run) -> None:
        """Parent and workers with --workers; the workers alone under other launchers, for torchrun, horovodrun and srun
        have listeners themselves. Under mpirun MPI opens some: tests/parallel/test_listeners.py counts those."""
        if run.launcher in ("hydra", "openmpi"):
            return
        self.looks += 1
        ours = run.launcher in ("workers", "forked")
        for pid in [run.process.pid] if ours else [p.pid for p in run.ranks().values()]:
            self.open |= {s for s in listeners.look(pid) if not is_loopback(s.ip)}

    def through(self, run: Run, seconds: float = 120) -> tuple[int, str]:
        """Until the run ends."""
        self.runs += run.launcher not in ("hydra", "openmpi")
        deadline = time.monotonic() + seconds
        while run.process.poll() is None and time.monotonic() < deadline:
            self.look(run)
            time.sleep(0.2)
        return run.wait()


def kills(count: int, draw: random.Random) -> Outcome:
    """Of `--workers`, forked: two kills of three with gradients in shared memory, the others with gloo."""
    return killed([("forked", SINGLE if n % 3 == 2 else {}) for n in range(count)], draw)


def launchers(count: int, draw: random.Random) -> Outcome:
    """Of all launchers in turn, each started as users do."""
    names = [x for x in ("workers", "torchrun", "hydra", "openmpi", "horovodrun", "slurm") if not missing(x)]
    with scratch() as folder, slurm_cluster.SlurmCluster(folder) if "slurm" in names else nullcontext() as slurm:
        extra = {"SLURM_CONF": slurm.environment["SLURM_CONF"], "SLURM_KILL_BAD_EXIT": "1"} if slurm else {}
        result = killed([(names[n // 2 % len(names)], extra) for n in range(count)], draw)
    result.note += f"; {', '.join(names)} in turn"
    return result


def killed(plan: list[tuple[str, dict[str, str]]], draw: random.Random) -> Outcome:
    """A random rank or the launcher at a random moment; every second run is then taken to its end."""
    result, resumed, ended, doors = Outcome(len(plan)), 0, [], Doors()
    with scratch() as reference:
        begun = time.monotonic()
        with Run(reference, plan[0][0], 2, **STEPS) as run:
            code, text = doors.through(run)
        assert code == 0, text
        usual = time.monotonic() - begun
        for number, (launcher, extra) in enumerate(plan):
            resume = number % 2 == 0
            ranks, who, seconds = 2 if resume else draw.randint(2, 4), "", None
            with scratch() as folder:
                while not who:
                    shutil.rmtree(folder)
                    folder.mkdir()
                    begun = time.monotonic()
                    with Run(folder, launcher, ranks, extra=extra, **STEPS) as run:
                        who, seconds = one_kill(run, draw, draw.uniform(0.0, usual), doors)
                    if not who:  # it came to its end before
                        usual = min(usual, time.monotonic() - begun)
                what = f"kill {number} of {who} of {ranks} under {launcher}"
                result.check(seconds is not None, f"{what}: some live on")
                ended += [] if seconds is None else [seconds]
                if resume:
                    with Run(folder, launcher, 2, "--restart", "auto", data=False, extra=extra) as run:
                        code, text = doors.through(run)
                    resumed += 1
                    result.check(code == 0 and same(reference, folder), f"{what}: not resumed: {text[-1500:]}")
    result.check(not doors.open, f"reached from outside: {doors.open}")
    times = f"{statistics.median(ended):.2f} s in the middle, {max(ended):.2f} s at most"
    result.note = f"all processes had ended after {times}; {resumed} resumed to a byte-identical end; "
    result.note += f"no listener reached from outside in {doors.runs} runs watched from start to end"
    return result


def one_kill(run: Run, draw: random.Random, after: float, doors: Doors) -> tuple[str, float | None]:
    """(whom, seconds until all had ended or None); ("", None) for a run that came to its end before."""
    deadline = time.monotonic() + after
    launcher = run.launcher != "slurm"  # which starts workers through slurmd: they do not need a living srun
    while time.monotonic() < deadline or not (launcher or run.ranks()):
        if run.process.poll() is not None:
            return "", None
        run.tree()
        time.sleep(0.02)
    doors.look(run)
    workers = run.ranks()
    who = draw.choice([*workers, *([-1] if launcher else [])])
    try:
        (run.process if who < 0 else workers[who]).kill()
    except psutil.NoSuchProcess:
        return "", None
    begun = time.monotonic()
    while time.monotonic() < begun + 30:
        if not run.tree() and run.process.poll() is not None:
            return "the launcher" if who < 0 else f"rank {who}", time.monotonic() - begun
        time.sleep(0.02)
    return "the launcher" if who < 0 else f"rank {who}", None


def stops(count: int, draw: random.Random) -> Outcome:
    """Pauses of a random rank: shorter than the limit nothing happens, longer the others end."""
    result, given_up = Outcome(count), max(1, count // 10)
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


HOST = """
import json, os, sys, time, torch
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
while line := sys.stdin.readline():  # torch is loaded once; every job is a child
    if os.fork():
        print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    os.environ.update(json.loads(line))
    comm = join(detect())
    comm.watch.limit = 4.0
    print("ready", flush=True)
    while True:
        comm.all_reduce(torch.ones(1000))
        time.sleep(0.01)
"""


def cuts(count: int, draw: random.Random) -> Outcome:
    """Two hosts whose link is cut: both ends notice within the limit."""
    result, times = Outcome(count), []
    with scratch() as folder:
        hosts = Hosts(folder)
        try:
            hosts.up()
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            programs = [hosts.inside(rank, sys.executable, "-c", HOST) for rank in range(2)]
            with ExitStack() as stack:
                servers = [subprocess.Popen(program, env=ENVIRONMENT, **pipes) for program in programs]
                for server in servers:
                    stack.callback(server.wait)
                    stack.callback(server.kill)
                for number in range(count):
                    seconds = one_cut(hosts, servers, number, draw)
                    times.append(seconds)
                    result.check(seconds < 20, f"cut {number}: a worker lived on for {seconds:.0f} s")
        finally:
            hosts.down()
    result.note = f"both ends had ended after {max(times):.1f} s at most, limit 4 s"
    return result


def one_cut(hosts: Hosts, servers: list[subprocess.Popen], number: int, draw: random.Random) -> float:
    """Seconds until both workers had ended."""
    job = {"ALLFORCE_SIZE": "2", "ALLFORCE_LOCAL_RANK": "0", "ALLFORCE_LOCAL_SIZE": "1"}
    job |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(29600 + number)}
    for rank, server in enumerate(servers):
        server.stdin.write(json.dumps(job | {"ALLFORCE_RANK": str(rank)}) + "\n")
        server.stdin.flush()
    for server in servers:
        assert server.stdout.readline() == "ready\n"
    time.sleep(draw.uniform(0.1, 1.0))
    hosts.run("-n", hosts.names[0], "link", "set", "af0", "down")
    begun = time.monotonic()
    try:
        for server in servers:
            assert server.stdout.readline().startswith("ended")
        return time.monotonic() - begun
    finally:
        hosts.run("-n", hosts.names[0], "link", "set", "af0", "up")


# ---- checkpoints


def state(step: int) -> Checkpoint:
    torch.manual_seed(step)
    return Checkpoint({f"model/{k}": torch.randn(40, 50) for k in range(4)}, {"step": step, "model": {}, "run": "r"})


def writer(count: int, draw: random.Random) -> Outcome:
    """Kills of the writer at a random byte of the file: the newest intact one is the old or the new, whole."""
    result = Outcome(count)
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
        newest, killed, result.count = 2, 0, len(made)
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
    result, full = Outcome(count), 0
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
    result = Outcome(count)
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
                continue
    return result


# ---- files


def mutations(count: int, draw: random.Random) -> Outcome:
    """test_mutations.py with many examples."""
    numbers = [count, max(10, count // 10), max(10, count * 3 // 200)]
    env = os.environ | {"ALLFORCE_MUTATIONS": ",".join(map(str, numbers)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "--hypothesis-show-statistics", str(HERE / "test_mutations.py")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    tried = [0, 0, 0]
    for which, passed in re.findall(r"::test_(\w+):.*?(\d+) passing", done.stdout, re.DOTALL):
        tried[2 if which.endswith("model") else 1 if which == "data" else 0] += int(passed)
    result = Outcome(sum(tried))
    if done.returncode or tried < numbers:
        result.failures.append(done.stdout[-3000:])
        print(done.stdout[-3000:], flush=True)
    result.note = f"{tried[0]} inputs, {tried[1]} data sets, {tried[2]} model files"
    return result


def tests(count: int, draw: random.Random) -> Outcome:
    """Tests that CI runs shorter or under fewer launchers: here under all, and a worker comes 40 s late."""
    names = "late_worker or ctrl_c or given_up or killed_launcher or signal_saves"
    command = [sys.executable, "-m", "pytest", str(HERE), "-k", names]
    done = subprocess.run(
        command, env=os.environ | {"ALLFORCE_FAULTS": "full"}, cwd=ROOT, capture_output=True, text=True
    )
    numbers = dict(re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)[::-1])
    counts = {word: int(number) for number, word in numbers.items()}
    result = Outcome(counts.get("passed", 0) + counts.get("failed", 0))
    result.check(done.returncode == 0, done.stdout[-5000:])
    result.note = ", ".join(f"{n} {word}" for word, n in counts.items())
    return result


# ---- all together

SHARE = 0.9  # of the time of the chaos that steps would take at most: starts and pauses take the rest


def chaos(seconds: int, draw: random.Random) -> Outcome:
    """A fault every 10 s; the run restarts itself, or is started again, and ends as if nothing had happened. Should it
    end before the time is over, another one begins."""
    result, plan, ends = Outcome(), {**STEPS, "training__save_freq": 20}, 0
    plan["training__numb_steps"] = last = int(SHARE * seconds * speed(plan)) // 100 * 100
    with scratch() as reference:
        with Run(reference, "forked", 2, **plan) as run:
            code, text = run.wait(10 * seconds)
        assert code == 0, text
        lost, computed, begun = 0, 0, time.monotonic()
        while time.monotonic() < begun + seconds:
            with scratch() as folder:
                code, text, result.count = through_chaos(folder, plan, draw, begun, seconds, result.count)
                result.check(code == 0 and same(reference, folder, last), f"another end: {code} {text[-1000:]}")
            ends, vain = ends + 1, goodput(text)
            lost, computed = lost + vain, computed + vain + last
    share = 100 * (1 - lost / computed)
    result.check(share > 90, f"goodput {share:.1f} %")
    result.note = f"one every 10 s for {seconds} s; {ends} run(s) of {last} steps, byte-identical at the end; "
    result.note += f"{share:.1f} % of all steps computed are in the result"
    return result


def through_chaos(
    folder: Path, plan: dict[str, int], draw: random.Random, begun: float, seconds: int, faults: int
) -> tuple[int, str, int]:
    """One run to its end, started again whenever its launcher was killed: exit code, output, faults since the begin."""
    args, code = (), -1
    while code != 0 and time.monotonic() < begun + 20 * seconds:
        with Run(folder, "forked", 2, "--max-restarts", "1000", *args, data=not args, **plan) as run:
            faults = disturb(run, draw, begun, seconds, faults)
            code, text = run.wait(20 * seconds)
        args = ("--restart", "auto")
    return code, text, faults


def speed(plan: dict[str, int]) -> float:
    """Steps a second."""
    with scratch() as folder, Run(folder, "forked", 2, **plan | {"training__numb_steps": 1000}) as run:
        run.wait_for("Batch     100")
        begun = time.monotonic()
        run.wait_for("Batch    1000")
        return 900 / (time.monotonic() - begun)


def disturb(run: Run, draw: random.Random, begun: float, seconds: int, faults: int) -> int:
    """Faults until the time is over, the run has ended or its launcher was the victim; how many there were by then."""
    while 10 * (faults + 1) <= seconds:
        while time.monotonic() < begun + 10 * (faults + 1):
            run.tree()
            if run.process.poll() is not None:
                return faults
            time.sleep(0.1)
        faults += 1
        what, ranks = draw.choice(["kill", "kill", "stop", "launcher"]), list(run.ranks().values())
        if what == "launcher" or not ranks:
            run.process.kill()
            return faults
        victim = draw.choice(ranks)
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            if what == "stop":
                time.sleep(2)
                victim.send_signal(signal.SIGCONT)
    return faults


def goodput(text: str) -> int:
    """Steps that were computed in vain, to the nearest line of the log."""
    lost, at = 0, 0
    for line in text.splitlines():
        if "Continue at step" in line:
            lost += max(0, at - int(line.split("Continue at step")[1].split()[0]))
        elif "Start to train" in line:
            lost, at = lost + at, 0
        elif "Batch " in line and ": trn:" in line:
            at = int(line.split("Batch ")[1].split(":")[0])
    return lost


EXPERIMENTS: dict[str, tuple[Callable[[int, random.Random], Outcome], int]] = {
    "corruptions": (corruptions, 5000),
    "writer": (writer, 10_000),
    "calls": (calls, 1),
    "disks": (disks, 64),
    "mutations": (mutations, 20_000),
    "launchers": (launchers, 36),
    "kills": (kills, 164),
    "stops": (stops, 50),
    "cuts": (cuts, 20),
    "tests": (tests, 1),
    "chaos": (chaos, 480),
}
COMPUTING = ["chaos", "kills", "launchers", "mutations", "corruptions", "calls", "disks"]  # a core for each
WAITING = ["tests", "stops", "cuts", "writer"]  # for limits and for the disk: beside the others


def one(name: str, scale: float, seed: int) -> int:
    """Run an experiment and print its row; how many failures there were."""
    run, count = EXPERIMENTS[name]
    begun = time.monotonic()
    try:
        with scratch() as folder, ExitStack() as end:
            end.callback(os.chdir, os.getcwd())
            os.chdir(folder)  # saves leave `checkpoint` there
            outcome = run(max(2, round(count * scale)), random.Random(f"{seed} {name}"))
    except (FileNotFoundError, subprocess.CalledProcessError) as error:  # no strace, mount or ip, or no right to it
        outcome = Outcome(note=f"not tried: {error}")
    except BaseException:
        outcome = Outcome(failures=["broken"], note=traceback.format_exc())
    seconds = time.monotonic() - begun
    print(f"| {name} | {outcome.count} | {len(outcome.failures)} | {seconds:.0f} | {outcome.note} |", flush=True)
    return len(outcome.failures)


def side_by_side(scale: float, seed: int) -> int:
    """A process for each experiment: as many as there are cores compute, each on its own; one more waits."""
    free, computing, waiting = sorted(os.sched_getaffinity(0)), COMPUTING[::-1], WAITING[::-1]
    running, failed = dict[int, int](), 0
    while True:
        while computing and free:
            core = free.pop()
            running[start(computing.pop(), core, scale, seed)] = core
        if waiting and -1 not in running.values():
            running[start(waiting.pop(), -1, scale, seed)] = -1
        if not running:
            return failed
        pid, status = os.wait()
        failed += status != 0
        core = running.pop(pid)
        free += [core] if core >= 0 else []


def start(name: str, core: int, scale: float, seed: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if core >= 0:
                os.sched_setaffinity(0, {core})
            code = min(1, one(name, scale, seed))
        finally:
            os._exit(code)
    return pid


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", help="names with commas between, one after the other: " + ", ".join(EXPERIMENTS))
    p.add_argument("--scale", type=float, default=1.0, help="part of all counts")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    begun = time.monotonic()
    print("| experiment | count | failures | seconds | |\n|---|---|---|---|---|", flush=True)
    if args.only:
        failed = sum([one(name, args.scale, args.seed) for name in args.only.split(",")])
    else:
        failed = side_by_side(args.scale, args.seed)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
