"""Variables as launchers set them (recorded, shortened to what concerns ranks) and the world each means.

Each entry: the environment of one rank, and the fields of World expected.
"""

SLURM_JOB = {  # an allocation of 2 nodes, 4 tasks asked for
    "SLURM_JOB_ID": "812",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SLURM_BATCH = SLURM_JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
SLURM_STEP = SLURM_JOB | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "node07",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "31234",
    "HOROVOD_CONTROLLER": "gloo",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "prterun-node07-4711@1",
    "PRTE_LAUNCHED": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1711276033",
    "OMPI_MCA_ess_base_jobid": "1711276033",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "3",
    "MPI_LOCALNRANKS": "4",
    "HYDI_CONTROL_FD": "7",
}
INTEL = HYDRA | {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "I_MPI_ROOT": "/opt/intel/mpi"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_RANKID": "9",
    "PMI_RANK": "9",
    "PMI_SIZE": "16",
    "PALS_LOCAL_RANKID": "1",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "8",
    "PALS_APID": "6f1d",
    "PBS_JOBID": "77.pbs",
}
CRAY_SLURM = SLURM_STEP | {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "99",
    "PMIX_RANK": "7",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f23Xk",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "12",
}
EXPLICIT = {
    "ALLFORCE_RANK": "1",
    "ALLFORCE_SIZE": "2",
    "ALLFORCE_LOCAL_RANK": "0",
    "ALLFORCE_LOCAL_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

WORKERS = {
    "ALLFORCE_RANK": "1",
    "ALLFORCE_SIZE": "2",
    "ALLFORCE_LOCAL_RANK": "1",
    "ALLFORCE_LOCAL_SIZE": "2",
    "ALLFORCE_STORE_FD": "7",
}

# name: (environment, launcher, rank, size, local rank, local size, meeting or its beginning)
DISTRIBUTED = {
    "--workers": (WORKERS, "workers", 1, 2, 1, 2, "fd://7"),
    "torchrun": (TORCHRUN, "torchrun", 5, 8, 1, 4, "agent://node07:29400"),
    "torchrun as srun's task": (
        SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN, "torchrun", 5, 8, 1, 4, "agent://node07:29400",
    ),
    "horovodrun": (HOROVOD, "horovodrun", 1, 4, 1, 4, "http://127.0.0.1:31234"),
    "Open MPI 5": (OPEN_MPI_5, "openmpi", 2, 4, 2, 4, "local"),
    "Open MPI 4, two hosts": (OPEN_MPI_4, "openmpi", 1, 4, 1, 2, ""),
    "Open MPI in a Slurm batch script": (SLURM_BATCH | OPEN_MPI_5, "openmpi", 2, 4, 2, 4, "local"),
    "Open MPI, daemons as srun's tasks": (
        SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | OPEN_MPI_4, "openmpi", 1, 4, 1, 2, "",
    ),
    "MPICH": (HYDRA, "hydra", 3, 4, 3, 4, "local"),
    "Intel MPI": (INTEL, "hydra", 1, 4, 1, 4, "local"),
    "MPICH in a Slurm batch script": (SLURM_BATCH | HYDRA, "hydra", 3, 4, 3, 4, "local"),
    "MPICH with MASTER_ADDR": (HYDRA | {"MASTER_ADDR": "h", "MASTER_PORT": "1234"}, "hydra", 3, 4, 3, 4, "tcp://h:1234"),
    "MVAPICH2": (MVAPICH2, "mvapich2", 1, 2, 1, 2, "local"),
    "PALS": (PALS, "pals", 9, 16, 1, 8, ""),
    "Slurm on Cray": (CRAY_SLURM, "pals", 3, 4, 1, 2, "tcp://node07:"),
    "jsrun": (JSRUN, "jsrun", 7, 12, 1, 6, ""),
    "Flux": (FLUX, "flux", 3, 4, 1, 2, ""),
    "srun": (SLURM_STEP, "slurm", 3, 4, 1, 2, "tcp://node07:"),
    "srun --mpi=pmi2": (SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "3"}, "slurm", 3, 4, 1, 2, "tcp://node07:"),
    "explicit": (EXPLICIT, "explicit", 1, 2, 0, 1, "tcp://10.0.0.1:29500"),
    "explicit before all": (TORCHRUN | HYDRA | EXPLICIT, "explicit", 1, 2, 0, 1, "tcp://10.0.0.1:29500"),
    "rank variables vouched for": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "ALLFORCE_LAUNCHER": "torchrun"},
        "torchrun", 1, 2, 1, 2, "tcp://h:",
    ),
}  # fmt: skip

SERIAL = {
    "nothing": {},
    "Slurm batch script": SLURM_BATCH,
    "salloc's shell": SLURM_JOB,
    "interactive step": SLURM_BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    "interactive step that shows the job's tasks": SLURM_BATCH
    | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"},
    "srun -n 1": SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},
    "stale RANK": {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node07", "MASTER_PORT": "29500"},
    "RANK of something else": {"RANK": "captain"},
    "stale HOROVOD_RANK": {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"},
    "batch shell of Flux": {"FLUX_JOB_SIZE": "4", "FLUX_URI": "local:///run/flux"},
    "override": OPEN_MPI_5 | {"ALLFORCE_LAUNCHER": "none"},
    "srun --pty shell that lies": SLURM_STEP | {"SLURM_PROCID": "0", "ALLFORCE_LAUNCHER": "serial"},
}

# A rank above 0 nobody vouches for: (environment, whether it is taken as left over when a person typed the command).
UNVOUCHED = {
    "exported by hand": ({"RANK": "1", "WORLD_SIZE": "4"}, True),
    "exported by hand, all of it": ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, True),
    "in salloc's shell": (SLURM_JOB | {"RANK": "1", "WORLD_SIZE": "4"}, True),
    "of Horovod": ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}, True),
    "one of several hosts, each by hand": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node07"}, False),
    "torchrun's without its address": ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "abc"}, False),
    "an unknown PMIx launcher": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, False),
}

# name: (environment, words the error must have)
WRONG = {
    "rank beyond size": (HYDRA | {"PMI_RANK": "4"}, ["PMI_RANK=4", "PMI_SIZE=4"]),
    "rank without size": ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=1", "not OMPI_COMM_WORLD_SIZE"]),
    "size without rank": ({"MV2_COMM_WORLD_SIZE": "4"}, ["MV2_COMM_WORLD_SIZE=4", "not MV2_COMM_WORLD_RANK"]),
    "Hydra's port mode": ({"PMI_ID": "1", "PMI_PORT": "h:1", "MPI_LOCALRANKID": "1"}, ["not PMI_SIZE"]),
    "not a number": (OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "four"}, ["OMPI_COMM_WORLD_SIZE=four"]),
    "local beyond world": (OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, ["local rank 2 of 8", "4"]),
    "a second copy without a launcher": ({"RANK": "2", "WORLD_SIZE": "4"}, ["RANK=2", "unset RANK WORLD_SIZE"]),
    "an unknown PMIx launcher": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, ["PMIX_RANK=1", "ALLFORCE_RANK"]),
    "unknown override": ({"ALLFORCE_LAUNCHER": "mpi"}, ["ALLFORCE_LAUNCHER=mpi", "openmpi"]),
}  # fmt: skip
