"""How this process was started: one table of launcher variables → World. The only place that reads them."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from ..errors import UserError
from .hostlist import expand_hosts, expand_tasks

Env = Mapping[str, str]


class Launcher(NamedTuple):
    """One row: a word may name several variables, the first one that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    proof: tuple[str, ...]  # all must be set, or the numbers are leftovers of something else
    key: str  # what makes the job unique ("" = nothing does)


# fmt: off
# The order is the precedence: an inner launcher before the scheduler around it, so Slurm comes late.
LAUNCHERS = (
    Launcher("workers", "ALLFORCE_RANK", "ALLFORCE_SIZE", "ALLFORCE_LOCAL_RANK", "ALLFORCE_LOCAL_SIZE",
             ("ALLFORCE_STORE_FD",), ""),
    Launcher("explicit", "ALLFORCE_RANK", "ALLFORCE_SIZE", "ALLFORCE_LOCAL_RANK", "ALLFORCE_LOCAL_SIZE",
             ("ALLFORCE_SIZE",), "ALLFORCE_JOB"),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
             ("TORCHELASTIC_RUN_ID", "MASTER_ADDR"), "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT MASTER_PORT"),
    Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
             ("HOROVOD_GLOO_RENDEZVOUS_ADDR",), "HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT"),
    Launcher("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", (), "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid OMPI_MCA_orte_hnp_uri"),
    Launcher("mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
             "MV2_COMM_WORLD_LOCAL_SIZE", (), ""),
    Launcher("hydra", "PMI_RANK|PMI_ID", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
             ("MPI_LOCALRANKID",), ""),
    Launcher("pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID|PMI_LOCAL_RANK", "PALS_LOCAL_SIZE|PMI_LOCAL_SIZE",
             ("PALS_RANKID",), "PALS_APID"),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
             "JSM_NAMESPACE_LOCAL_SIZE", (), "LSB_JOBID JSM_NAMESPACE_ID"),
    Launcher("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", ("FLUX_TASK_RANK",), "FLUX_JOB_ID"),
    Launcher("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "",
             ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), "SLURM_JOB_ID SLURM_STEP_ID"),
    Launcher("pmi", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", (), "PMI_JOBID"),
)
# fmt: on

FULL_NAMES = {
    "workers": "--workers",
    "explicit": "ALLFORCE_RANK and ALLFORCE_SIZE",
    "openmpi": "Open MPI's mpirun",
    "mvapich2": "MVAPICH2's mpirun",
    "hydra": "mpirun of MPICH or Intel MPI",
    "pals": "PALS (mpiexec of HPE Cray)",
    "flux": "flux run",
    "slurm": "srun",
    "pmi": "a PMI launcher",
}

# These outlive their workers: one that is gone was killed.
LASTING = ("workers", "torchrun", "horovodrun", "openmpi", "mvapich2", "hydra", "pals", "jsrun", "flux", "slurm")
LOST = 75  # exit code: a worker or its launcher died or hangs, nobody's mistake (EX_TEMPFAIL of sysexits.h)

SECRET_REMEDY = (
    "Before the launcher, so that it passes it on to all workers: export ALLFORCE_SECRET=$(openssl rand -hex 32)"
)
SLURM_RESERVED_STEPS = 4294967290  # this step id and above: interactive, batch and extern steps, one process

# Numbers of ranks nobody vouches for: on their own they prove nothing, but a rank above 0 was never a lone process.
LEFTOVERS = (("RANK", "WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE"), ("PMIX_RANK", ""))
MEETINGS = ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")  # with one of these, somebody had workers in mind

INHERITED = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_ ROLE_ MASTER_ TORCHELASTIC_ HOROVOD_ OMPI_ PMIX_ PRTE_ PMI_ "
    "HYDI_ MPI_LOCAL MV2_COMM_ PALS_ JSM_ FLUX_TASK_ SLURM_PROCID SLURM_LOCALID SLURM_STEP_ ALLFORCE_RANK "
    "ALLFORCE_SIZE ALLFORCE_LOCAL_ ALLFORCE_JOB ALLFORCE_LAUNCHER ALLFORCE_SECRET ALLFORCE_STORE_FD "
    "ALLFORCE_LINE_FD"
).split()


@dataclass
class World:
    """The place of this process among the workers of its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    hosts: list[str] = field(default_factory=list)  # as far as the launcher tells; complete after connect()
    job_key: str = ""  # the same on every rank, different for every job
    job_name: str = ""  # what the launcher's variables say of it, also where ranks have no common ancestor
    secret: str = field(default="", repr=False)  # ALLFORCE_SECRET, or one that rank 0 draws when the workers meet
    exposed: str = ""  # where strangers may learn that secret
    meeting: str = ""  # fd://number, agent://host:port, tcp://host:port, http://host:port, local, or "" (unknown)
    launcher_pid: int = 0  # the nearest ancestor that is not itself a rank
    mpi_library: str = ""  # libmpi of the mpirun that started us, where it tells
    local_assumed: bool = False  # the launcher gave no local rank: all ranks are taken to be on one host
    cleanup: list[Path] = field(default_factory=list)  # what led the workers to each other
    note: str = ""  # something the user should know, for the log

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    @property
    def surely_one_host(self) -> bool:
        """Not only for want of a better knowledge."""
        return self.one_host and not self.local_assumed

    @property
    def started_by(self) -> str:
        return FULL_NAMES.get(self.launcher, self.launcher)


def detect(env: Env = os.environ) -> World:
    """The world this process was started in; serial when no launcher vouches for more than one process.

    ALLFORCE_LAUNCHER names a row of the table (or `none`) and settles every doubt.
    """
    forced = env.get("ALLFORCE_LAUNCHER", "")
    if forced in ("none", "serial"):
        return World(hosts=[socket.gethostname()])
    if forced:
        return _world(_row(forced), env)
    for row in LAUNCHERS:
        if _applies(row, env):
            return _world(row, env)
    return World(hosts=[socket.gethostname()], note=_leftovers(env))


def scrubbed(env: Env = os.environ) -> dict[str, str]:
    """The environment for a child that must not take itself for a rank of this job."""
    kept = "HOROVOD_TIMELINE"  # a wish of the user
    return {name: value for name, value in env.items() if name == kept or not name.startswith(tuple(INHERITED))}


def _row(name: str) -> Launcher:
    for row in LAUNCHERS:
        if row.name == name:
            return row
    names = ", ".join(["none", *(row.name for row in LAUNCHERS)])
    raise UserError(f"ALLFORCE_LAUNCHER={name} is not a launcher Allforce knows. Choose one of: {names}.")


def _applies(row: Launcher, env: Env) -> bool:
    if not all(name in env for name in row.proof):
        return False
    if row.name == "slurm":  # a batch script or an interactive shell shows the tasks that were asked for, yet is alone
        return _integer("SLURM_STEP_ID", env) < SLURM_RESERVED_STEPS and _integer(row.size, env) > 1
    return _name(row.rank, env) is not None or _name(row.size, env) is not None


def _world(row: Launcher, env: Env) -> World:
    rank, size = _number(row.rank, env), _number(row.size, env)
    if rank is None or size is None:
        have, lack = (row.size, row.rank) if rank is None else (row.rank, row.size)
        found = " and ".join(f"{n}={env[n]}" for n in (*have.split("|"), *row.proof) if n in env)
        raise UserError(
            f"{FULL_NAMES.get(row.name, row.name)} set {found or 'no rank'} but not {lack.replace('|', ' or ')}, so"
            " it is unknown which worker this is. Start again under a launcher, or set ALLFORCE_LAUNCHER=none."
        )
    if not 0 <= rank < size:
        raise UserError(
            f"{_name(row.rank, env)}={rank} does not fit {_name(row.size, env)}={size}: ranks go from 0 to size - 1."
            " Variables of two launchers are mixed in the environment; unset them, or set ALLFORCE_LAUNCHER=none."
        )
    local_rank, local_size = _number(row.local_rank, env), _local_size(row, size, env)
    world = World(rank, size, launcher=row.name, hosts=_hosts(row, env))
    world.local_assumed = local_rank is None or local_size is None
    if local_rank is None or local_size is None:
        local_rank, local_size = rank, size
    world.local_rank, world.local_size = local_rank, local_size
    if not 0 <= local_rank < local_size <= size:
        raise UserError(
            f"{FULL_NAMES.get(row.name, row.name)} says local rank {local_rank} of {local_size} on this host, in a job"
            f" of {size}: that cannot be. Variables of two launchers are mixed; start from a fresh shell."
        )
    world.launcher_pid = launcher_process(_name(row.rank, env) or row.rank)
    world.job_name = "-".join([row.name, *(env[name] for name in row.key.split() if env.get(name))])
    world.job_key = _job_key(world)
    world.secret = _secret(env)
    world.meeting = _meeting(row, world, env)
    world.mpi_library = _mpi_library(env)
    if world.one_host and not world.hosts:
        world.hosts = [socket.gethostname()]
    return world


def _leftovers(env: Env) -> str:
    """Rank variables without a launcher: rank 0 runs serially and says so, another rank is never run as a copy."""
    for rank_name, size_name in LEFTOVERS:
        rank, size = env.get(rank_name, ""), env.get(size_name, "") if size_name else "2"
        if not rank.isdigit() or not size.isdigit() or int(size) < 2:
            continue
        found = f"{rank_name}={rank}" + (f" and {size_name}={size}" if size_name else "")
        if int(rank) > 0 and not _left_in_a_shell(rank_name, env):
            raise UserError(
                f"{found} is set, but no launcher Allforce knows started this process. If it is left over in your"
                f" shell: unset {rank_name} {size_name}. If your own launcher set it: export ALLFORCE_RANK,"
                " ALLFORCE_SIZE, ALLFORCE_LOCAL_RANK, ALLFORCE_LOCAL_SIZE, MASTER_ADDR, MASTER_PORT for each worker."
            )
        return f"{found} is set, but no launcher started this process: taken as left over, running serially."
    return ""


def _left_in_a_shell(rank_name: str, env: Env) -> bool:
    """A rank above 0 that is surely no worker: typed by a person, no other rank beside it, nowhere to meet one."""
    return not any(name in env for name in MEETINGS) and typed_at_a_terminal() and not _other_ranks(rank_name, env)


def typed_at_a_terminal() -> bool:
    """This process is the foreground job of a terminal, in a process group that its parent made for it.

    Only a shell with job control does that. Children of launchers and scripts are in the group of their parent, or in
    the background, or have no terminal; a rank started with `&` is in the background.
    """
    parent = os.getppid()
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)  # of this session, wherever the output goes
        try:
            foreground = os.tcgetpgrp(terminal)
        finally:
            os.close(terminal)
        return foreground == os.getpgrp() != os.getpgid(parent) and os.getsid(0) == os.getsid(parent)
    except OSError:
        return False


def _other_ranks(rank_name: str, env: Env) -> bool:
    """The shell runs a process with another rank: `for r in 0 1 2; do RANK=$r dp train … & done; fg`."""
    try:
        siblings = psutil.Process(os.getppid()).children()
    except psutil.Error:
        return False
    for sibling in siblings:
        try:
            if sibling.environ().get(rank_name, env[rank_name]) != env[rank_name]:
                return True
        except (psutil.Error, OSError):
            continue  # it has just ended
    return False


def _local_size(row: Launcher, size: int, env: Env) -> int | None:
    if row.name == "slurm":
        tasks = expand_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _number("SLURM_NODEID", env) or 0
        return tasks[node] if node < len(tasks) else None
    if row.name == "flux":  # the same number on every node, or unknown
        nodes = _number("FLUX_JOB_NNODES", env) or 1
        return size // nodes if size % nodes == 0 else None
    return _number(row.local_size, env)


def _hosts(row: Launcher, env: Env) -> list[str]:
    if row.name in ("slurm", "pals") and "PBS_NODEFILE" not in env:
        return expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    if row.name == "pals":
        return _distinct_lines(env.get("PBS_NODEFILE", ""))
    if row.name == "jsrun":  # the first entry is the node where the script runs
        return _distinct_lines(env.get("LSB_DJOB_RANKFILE") or env.get("LSB_DJOB_HOSTFILE", ""))[1:]
    return []


def _distinct_lines(path: str) -> list[str]:
    try:
        return list(dict.fromkeys(Path(path).read_text().split())) if path else []
    except OSError:
        return []  # such files often exist on the first node only; without them the rendezvous asks for MASTER_ADDR


def _meeting(row: Launcher, world: World, env: Env) -> str:
    """Where the workers find each other, in this order: given, torchrun's or Horovod's store, this host, node list."""
    if row.name == "workers":
        return f"fd://{env['ALLFORCE_STORE_FD']}"
    port = env.get("MASTER_PORT") or derived_port(world.job_key)
    if row.name == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        return f"agent://{env['MASTER_ADDR']}:{port}"
    if env.get("MASTER_ADDR"):
        return f"tcp://{env['MASTER_ADDR']}:{port}"
    if row.name == "horovodrun":
        return f"http://{env['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{env.get('HOROVOD_GLOO_RENDEZVOUS_PORT', '')}"
    if world.one_host:
        return "local"
    return f"tcp://{world.hosts[0]}:{port}" if world.hosts else ""


def derived_port(job_key: str) -> int:
    """A port below the ephemeral range that every rank of the job computes alike."""
    return 10000 + int(hashlib.sha256(job_key.encode()).hexdigest(), 16) % 20000


def _job_key(world: World) -> str:
    if world.job_name != world.launcher or not world.one_host:
        return world.job_name
    try:
        return f"{world.job_name}-{world.launcher_pid}-{psutil.Process(world.launcher_pid).create_time()}"
    except psutil.Error:
        return f"{world.job_name}-{world.launcher_pid}"


def _secret(env: Env) -> str:
    secret = env.get("ALLFORCE_SECRET", "")
    if 0 < len(secret) < 16:
        raise UserError(
            f"ALLFORCE_SECRET has {len(secret)} characters, which can be guessed; 16 or more are expected."
            f" {SECRET_REMEDY}"
        )
    return secret


def job_number(env: Env = os.environ) -> int | None:
    """The number a scheduler gave to this job, for names of files."""
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID"):
        digits = re.match(r"\d+", env.get(name, ""))
        if digits:
            return int(digits[0])
    return None


def launcher_process(rank_name: str) -> int:
    """The nearest ancestor whose own environment has no rank: mpirun's proxy, torchrun's agent, slurmstepd."""
    process = psutil.Process()
    for parent in process.parents():
        try:
            if rank_name not in parent.environ():
                return parent.pid
        except (psutil.Error, OSError):
            return parent.pid  # of another user (slurmstepd is root's)
    return os.getppid()


def _mpi_library(env: Env) -> str:
    folders = [env.get("OMPI_LIBDIR_LOC", ""), f"{env['OPAL_PREFIX']}/lib" if "OPAL_PREFIX" in env else ""]
    paths = [Path(folder) / "libmpi.so.40" for folder in folders if folder]
    return next((str(path) for path in paths if path.exists()), "")


def _name(names: str, env: Env) -> str | None:
    return next((name for name in names.split("|") if env.get(name)), None)


def _number(names: str, env: Env) -> int | None:
    name = _name(names, env)
    return None if name is None else _integer(name, env)


def _integer(name: str, env: Env) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UserError(
            f"{name}={env[name]} in the environment should be an integer; it is set by launchers only."
        ) from None
