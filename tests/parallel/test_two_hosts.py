"""Two hosts: two network namespaces with addresses and names of their own, joined by one cable. Launchers cross it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, OPEN_MPI, ROOT, missing

from allforce.distributed.launch import scrubbed

SUITE = Path(__file__).with_name("comm_suite.py")
ENVIRONMENT = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

# Open MPI takes two processes for neighbours when their hosts have one name.
ENTER = """\
#!/bin/sh
exec {ip} netns exec $1 {unshare} --uts sh -c 'hostname $1; shift; exec "$@"' sh "$@"
"""

# mpirun reaches another host by ssh; here by entering the other namespace.
SSH = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in {addresses[0]}) name={names[0]} ;; {addresses[1]}) name={names[1]} ;; *) exit 1 ;; esac
shift
exec {enter} $name sh -c "$*"
"""


class Hosts:
    """`names` of the namespaces and their `addresses`."""

    def __init__(self, folder: Path) -> None:
        self.ip, self.unshare = (
            shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for p in ("ip", "unshare")
        )
        self.names = [f"allforce{os.getpid()}-{n}" for n in range(2)]
        self.addresses = ["10.231.7.1", "10.231.7.2"]
        self.enter, self.ssh = folder / "enter", folder / "ssh"
        for path, text in ((self.enter, ENTER), (self.ssh, SSH)):
            path.write_text(text.format(**vars(self)))
            path.chmod(0o755)

    def run(self, *words: str) -> None:
        subprocess.run([str(self.ip), *words], check=True, capture_output=True, text=True)

    def up(self) -> None:
        table = "".join(f"{place} {name}\n" for place, name in zip(self.addresses, self.names, strict=True))
        for name in self.names:
            self.run("netns", "add", name)
            folder = Path("/etc/netns") / name  # shown as /etc inside: without it every look-up waits for a name server
            folder.mkdir(parents=True)
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        ends, (first, second) = ["af0", "af1"], self.names
        self.run(*f"link add af0 netns {first} type veth peer name af1 netns {second}".split())
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            self.run("-n", name, "addr", "add", f"{address}/24", "dev", end)
            self.run("-n", name, "link", "set", "lo", "up")
            self.run("-n", name, "link", "set", end, "up")
        for n, name in enumerate(self.names):
            shown = subprocess.run(self.inside(n, "hostname"), check=True, capture_output=True, text=True).stdout
            assert shown.strip() == name

    def down(self) -> None:
        for name in self.names:
            subprocess.run([str(self.ip), "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def inside(self, host: int, *command) -> list[str]:
        return [str(self.enter), self.names[host], *map(str, command)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    if hosts.ip is None or hosts.unshare is None:
        pytest.skip("iproute2 or util-linux is not installed (scripts/ci_packages.sh installs iproute2)")
    try:
        hosts.up()
    except (subprocess.CalledProcessError, OSError) as error:
        hosts.down()
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    yield hosts
    hosts.down()


def test_torchrun(hosts):
    options = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={hosts.addresses[0]}", "--master-port=29533"]
    suite = [SUITE, "--hosts", "2", "--expect", "torch", "torchrun"]
    commands = [hosts.inside(n, BIN / "torchrun", *options, f"--node-rank={n}", *suite) for n in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, env=ENVIRONMENT, **pipes) for command in commands]
    try:
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "passed: torch under torchrun, 4 ranks" in outputs[0]


def mpirun(hosts, launcher: str, *program, **extra: str) -> subprocess.CompletedProcess[str]:
    """One rank on each host."""
    first, second = hosts.addresses
    options = {
        "hydra": ["-launcher", "ssh", "-launcher-exec", hosts.ssh, "-ppn", "1", "-hosts", f"{first},{second}"],
        "openmpi": ["--allow-run-as-root", "--prtemca", "plm_ssh_agent", hosts.ssh, "--host", f"{first}:1,{second}:1"],
    }
    start = {"hydra": BIN / "mpirun", "openmpi": OPEN_MPI}[launcher]
    command = hosts.inside(0, start, *options[launcher], "-np", "2", sys.executable, *program)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, env=ENVIRONMENT | extra, timeout=120, **output)


@pytest.mark.parametrize("engine", ["mpi", "torch"])
@pytest.mark.parametrize("launcher", ["hydra", "openmpi"])
def test_mpirun(hosts, launcher, engine):
    """MPI itself, and gloo with rank 0 found through MPI: no variable names a host."""
    if reason := missing(launcher):
        pytest.skip(reason)
    result = mpirun(hosts, launcher, SUITE, "--hosts", "2", "--engine", engine, "--expect", engine, launcher)
    assert result.returncode == 0, result.stdout
    assert f"passed: {engine} under {launcher}, 2 ranks" in result.stdout


@pytest.mark.parametrize("launcher", ["hydra", "openmpi"])
def test_mpirun_notices_the_dead(hosts, launcher):
    """MPI has only led gloo's workers to each other and is closed: mpirun still ends the job when one is killed."""
    if reason := missing(launcher):
        pytest.skip(reason)
    result = mpirun(hosts, launcher, SUITE.with_name("misfortune.py"), "is killed", ENGINE="torch")
    assert result.returncode != 0 and "unharmed" not in result.stdout, result.stdout
    # who notices first has the word: mpirun, or the other rank
    assert re.search(r"signal 9|EXIT CODE: 9|rank 1 \(process \d+ on \S+\) has ended", result.stdout), result.stdout


def test_one_interface_only(hosts):
    """Rank 0 and gloo listen at the address that leads to the other host, not at all of them."""
    explicit = {"ALLFORCE_SIZE": "2", "ALLFORCE_LOCAL_RANK": "0", "ALLFORCE_LOCAL_SIZE": "1", "MASTER_PORT": "29534"}
    explicit |= {"MASTER_ADDR": hosts.names[0], "ALLFORCE_SHARED_MEMORY": "0"}
    command = [sys.executable, SUITE, "--hosts", "2", "--expect", "torch", "explicit"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(hosts.inside(n, *command), env=ENVIRONMENT | explicit | {"ALLFORCE_RANK": str(n)}, **pipes)
        for n in range(2)
    ]
    seen: list[set[str]] = [set(), set()]
    deadline = time.monotonic() + 100
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            for n in range(2):
                shown = subprocess.run([str(hosts.ip), "netns", "exec", hosts.names[n], "ss", "-ltnH"], **pipes).stdout
                seen[n] |= {line.split()[3].rpartition(":")[0] for line in shown.splitlines()}
        outputs = [rank.communicate(timeout=10)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert seen == [{address} for address in hosts.addresses]


def test_a_stranger_on_the_other_host(hosts):
    """He reaches rank 0's store while it waits for a late worker: nothing is let in, and the workers meet."""
    explicit = {"ALLFORCE_SIZE": "2", "ALLFORCE_LOCAL_RANK": "0", "ALLFORCE_LOCAL_SIZE": "1", "MASTER_PORT": "29535"}
    explicit |= {"MASTER_ADDR": hosts.names[0], "ALLFORCE_SECRET": "0123456789abcdef"}
    suite = [sys.executable, SUITE, "--hosts", "2", "--expect", "torch", "explicit"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def rank(n: int) -> subprocess.Popen:
        return subprocess.Popen(
            hosts.inside(n, *suite), env=ENVIRONMENT | explicit | {"ALLFORCE_RANK": str(n)}, **pipes
        )

    command = hosts.inside(1, sys.executable, SUITE.with_name("stranger.py"), hosts.addresses[0], "29535")
    guest = subprocess.Popen(command, env=ENVIRONMENT, **pipes | {"stderr": subprocess.DEVNULL})
    running = [guest, rank(0)]
    try:
        found = json.loads(guest.stdout.readline())
        assert not found["torch"] and set(found["secrets"]) == {"refused"} and all(found["hangs_up"]), found
        running.append(rank(1))
        outputs = [process.communicate(timeout=100)[0] for process in running[1:]]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running[1:]] == [0, 0], outputs
