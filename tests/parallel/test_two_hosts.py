"""Two hosts: two network namespaces with addresses of their own, joined by one cable. Torchrun and mpirun cross it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, missing

from allforce.distributed.launch import scrubbed

SUITE = Path(__file__).with_name("comm_suite.py")
ENVIRONMENT = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

# mpirun reaches another host by ssh; here by entering the other namespace.
SSH = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in {addresses[0]}) name={names[0]} ;; {addresses[1]}) name={names[1]} ;; *) exit 1 ;; esac
shift
exec {ip} netns exec $name sh -c "$*"
"""


class Hosts:
    """`names` of the namespaces and their `addresses`."""

    def __init__(self) -> None:
        self.ip = shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        self.names = [f"allforce{os.getpid()}-{n}" for n in range(2)]
        self.addresses = ["10.231.7.1", "10.231.7.2"]

    def run(self, *words: str) -> None:
        subprocess.run([str(self.ip), *words], check=True, capture_output=True, text=True)

    def up(self) -> None:
        for name in self.names:
            self.run("netns", "add", name)
            folder = Path("/etc/netns") / name  # shown as /etc inside: without it every look-up waits for a name server
            folder.mkdir(parents=True)
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            (folder / "hosts").write_text("127.0.0.1 localhost\n10.231.7.1 host1\n10.231.7.2 host2\n")
        ends, (first, second) = ["af0", "af1"], self.names
        self.run(*f"link add af0 netns {first} type veth peer name af1 netns {second}".split())
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            self.run("-n", name, "addr", "add", f"{address}/24", "dev", end)
            self.run("-n", name, "link", "set", "lo", "up")
            self.run("-n", name, "link", "set", end, "up")

    def down(self) -> None:
        for name in self.names:
            subprocess.run([str(self.ip), "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def inside(self, host: int, *command) -> list[str]:
        return [str(self.ip), "netns", "exec", self.names[host], *map(str, command)]


@pytest.fixture(scope="module")
def hosts():
    hosts = Hosts()
    if hosts.ip is None:
        pytest.skip("iproute2 is not installed (scripts/ci_packages.sh installs it)")
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


@pytest.mark.parametrize("engine", ["mpi", "torch"])
def test_mpirun(hosts, tmp_path, engine):
    """MPI itself, and gloo with rank 0 found through MPI: no variable names a host."""
    if reason := missing("hydra"):
        pytest.skip(reason)
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(ip=hosts.ip, names=hosts.names, addresses=hosts.addresses))
    ssh.chmod(0o755)
    options = ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", ",".join(hosts.addresses), "-ppn", "1", "-np", "2"]
    suite = [sys.executable, SUITE, "--hosts", "2", "--engine", engine, "--expect", engine, "hydra"]
    result = subprocess.run(
        hosts.inside(0, BIN / "mpirun", *options, *suite), env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"passed: {engine} under hydra, 2 ranks" in result.stdout
