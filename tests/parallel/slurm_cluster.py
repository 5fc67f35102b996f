"""A one-node Slurm on loopback ports, without systemd: munged, slurmctld and slurmd from a slurm.conf of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
SlurmctldParameters=enable_configless
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str:
    """The reason why no Slurm can be started here, or nothing."""
    programs = "munged slurmctld slurmd srun sinfo".split()
    missing = [name for name in programs if find(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (scripts/ci_packages.sh installs them)"
    return "" if os.geteuid() == 0 else "a Slurm of our own needs root"


def find(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


class SlurmCluster:
    """Use as a context; `environment` leads srun and sbatch to this cluster."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        self.folder.chmod(0o755)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        cpus = len(os.sched_getaffinity(0))
        host = socket.gethostname().partition(".")[0]
        text = CONF.format(host=host, folder=self.folder, ports=free_ports(2), cpus=cpus)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        try:
            munge = {key: f"{self.folder}/munge.{key}" for key in ("socket", "pid", "log", "seed")}
            self.start("munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
                       f"--socket={munge['socket']}", f"--pid-file={munge['pid']}", f"--log-file={munge['log']}",
                       f"--seed-file={munge['seed']}")  # fmt: skip
            self.until(lambda: Path(munge["socket"]).exists(), "munged")
            self.start("slurmctld", "-D", "-c")
            self.start("slurmd", "-D", "-N", host)
            self.until(self.idle, "the node")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, program: str, *arguments: str) -> None:
        out = (self.folder / f"{program}.out").open("w")
        command = [str(find(program)), *arguments]
        self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))
        out.close()

    def idle(self) -> bool:
        command = [str(find("sinfo")), "--noheader", "--format=%T"]
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return answer.stdout.strip() == "idle"

    def until(self, ready, what: str) -> None:
        deadline = time.monotonic() + 60
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.[ol][uo][tg]"))
                raise TimeoutError(f"{what} of the test's Slurm did not come up:\n{logs}")
            time.sleep(0.2)

    def __exit__(self, *_) -> None:
        self.cancel_jobs()
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for step in self.steps():  # a step whose slurmd went first stays behind
            step.kill()

    def cancel_jobs(self) -> None:
        """A test that failed half-way leaves its job, whose processes would outlive the cluster."""
        if len(self.daemons) < 3:
            return
        subprocess.run([str(find("scancel")), "--full", "--state=RUNNING"], env=self.environment, capture_output=True)
        subprocess.run([str(find("scancel")), "--state=PENDING"], env=self.environment, capture_output=True)
        deadline = time.monotonic() + 15
        while not self.idle() and time.monotonic() < deadline:
            time.sleep(0.2)

    def steps(self) -> list[psutil.Process]:
        """slurmstepd of this cluster and of no other."""
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                if (process.info["name"] or "").startswith("slurmstepd"):
                    if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                        found.append(process)
            except psutil.Error:
                continue
        return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
