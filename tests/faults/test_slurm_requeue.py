"""The job script of docs/reliability.md under a real Slurm: requeued in the middle, it ends as if it had not been."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run import ROOT, Run, slurm_cluster

from allforce.distributed.launch import scrubbed
from allforce.files import checkpoint

STEPS = {"training__numb_steps": 800, "training__disp_freq": 10, "training__save_freq": 250, "training__seed": 3}


def job_script() -> str:
    text = (ROOT / "docs/reliability.md").read_text()
    (script,) = [block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "#SBATCH" in block]
    return script


def until(ready, what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def test_requeue(tmp_path):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    whole, folder, home = (tmp_path / name for name in ("whole", "job", "slurm"))
    for path in (whole, folder, home):
        path.mkdir()
    with Run(whole, "forked", 2, **STEPS) as run:
        code, text = run.wait()
        assert code == 0, text
    from tiny import write_data, write_input

    write_data(folder)
    write_input(folder, **STEPS)
    (folder / "job.sh").write_text(job_script())
    log, bin = folder / "train.log", Path(sys.executable).parent
    with slurm_cluster.SlurmCluster(home) as cluster:
        env = scrubbed(os.environ) | {"SLURM_CONF": cluster.environment["SLURM_CONF"], "OMP_NUM_THREADS": "1"}
        env |= {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

        def slurm(*words: str) -> str:
            done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=60)
            return (done.stdout + done.stderr).strip()

        def said() -> str:
            output = "".join(p.read_text() for p in folder.glob("slurm-*.out"))
            return f"{slurm('scontrol', 'show', 'job', number)}\n{output}"

        number = slurm("sbatch", "--parsable", "-n", "2", "--overcommit", "--open-mode=append", "job.sh")
        until(lambda: log.exists() and "Batch     100" in log.read_text(), said)
        slurm("scontrol", "requeue", number)

        def resumed() -> bool:
            slurm("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm lets a requeued job wait otherwise
            return "Continue at step" in log.read_text()

        until(resumed, said)
        until(lambda: "finished training" in log.read_text(), said)
        until(lambda: "JobState=COMPLETED" in slurm("scontrol", "show", "job", number), said)
        assert "Restarts=1" in slurm("scontrol", "show", "job", number)
    assert (whole / "lcurve.out").read_bytes() == (folder / "lcurve.out").read_bytes()
    one, two = (checkpoint.read(p / "model.ckpt-800.safetensors").tensors for p in (whole, folder))
    assert all(torch.equal(one[k], two[k]) for k in one)
