"""What the benchmarks share: the water input, running a trainer as a user does, the machine's name, writing results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
WATER = Path(os.environ.get("ALLFORCE_WATER", ROOT / "examples/water"))


# --- programs ------------------------------------------------------------------------------------------------------
def peer_folder(kind: str) -> Path:
    """Environment of DeePMD-kit's `tf` or `pt` side, as `make peers` puts it."""
    return Path(os.environ.get(f"ALLFORCE_PEER_{kind.upper()}", ROOT / f".peers/{kind}"))


def python_of(name: str) -> Path:
    """Interpreter of a program: ours, `tf` or `pt`."""
    return Path(sys.executable) if name == "ours" else peer_folder(name) / "bin/python"


def command(name: str) -> list[str]:
    """How a program's `dp` is started."""
    if name == "ours":
        return [sys.executable, "-m", "allforce"]
    return [str(peer_folder(name) / "bin/dp"), f"--{name}"]


LABEL = {"ours": "Allforce", "tf": "DeePMD-kit TensorFlow", "pt": "DeePMD-kit PyTorch"}


def available(names: list[str]) -> list[str]:
    """The programs that are installed; says which are left out."""
    present = [n for n in names if python_of(n).exists()]
    for n in sorted(set(names) - set(present)):
        print(f"left out: {LABEL[n]} (no {python_of(n)}; `make peers` makes it)", flush=True)
    return present


def environment(name: str, threads: int) -> dict[str, str]:
    """The same number of threads for everyone, and none of the caller's launcher or peer settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DP_", "TF_"))}
    env.update(
        OMP_NUM_THREADS=str(threads),
        DP_INTRA_OP_PARALLELISM_THREADS=str(threads),
        DP_INTER_OP_PARALLELISM_THREADS="1",
        PYTHONUNBUFFERED="1",
        CUDA_VISIBLE_DEVICES="",
        PATH=f"{python_of(name).parent}{os.pathsep}{env['PATH']}",
    )
    if name == "ours":
        env["PYTHONPATH"] = str(ROOT)
    return env


# --- data and input ------------------------------------------------------------------------------------------------
def find_systems(folder: Path) -> list[Path]:
    """Every DeePMD system below a folder, sorted by name."""
    systems = sorted(p.parent for p in Path(folder).resolve().rglob("type.raw"))  # a run has a folder of its own
    if not systems:
        raise SystemExit(f"no DeePMD system (type.raw) below {folder}; give one with --data or ALLFORCE_WATER")
    return systems


def water_input(systems: list[Path], steps: int, display: int, batch: int = 1, precision: str = "float64") -> dict:
    """The water example of DeePMD-kit (se_e2_a), for `steps` steps, without validation and checkpoints on the way."""
    return {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {
                "type": "se_e2_a",
                "sel": [46, 92],
                "rcut_smth": 0.5,
                "rcut": 6.0,
                "neuron": [25, 50, 100],
                "resnet_dt": False,
                "axis_neuron": 16,
                "type_one_side": True,
                "precision": precision,
                "seed": 1,
            },
            "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "precision": precision, "seed": 1},
        },
        "learning_rate": {"type": "exp", "decay_steps": 5000, "start_lr": 0.001, "stop_lr": 3.51e-8},
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
            "start_pref_v": 0,
            "limit_pref_v": 0,
        },
        "training": {
            "training_data": {"systems": [str(s) for s in systems], "batch_size": batch},
            "numb_steps": steps,
            "seed": 10,
            "disp_file": "lcurve.out",
            "disp_freq": display,
            "save_freq": 10**6,
        },
    }


# --- running -------------------------------------------------------------------------------------------------------
@dataclass
class Run:
    """One training as a user sees it."""

    wall_step: float  # s per step, wall clock between display rows; nothing is left out
    own_step: float  # s per step as the program itself reports it (display left out)
    cpu_step: float  # s of CPU time per step between display rows, all threads: a busy machine changes it little
    first_row: float  # s from the start of the process to the first row of learning
    peak_mb: float  # largest resident memory of the process
    rmse_f: float  # of the last row of lcurve.out

    def __str__(self) -> str:
        return (
            f"{self.wall_step * 1e3:8.1f} ms/step ({self.own_step * 1e3:.1f} by its own log, "
            f"{self.cpu_step * 1e3:.1f} of CPU), {self.peak_mb:.0f} MB, "
            f"first row after {self.first_row:.1f} s, rmse_f {self.rmse_f:.2f}"
        )


ROW = re.compile(r"\bbatch\s+(\d+)\b", re.IGNORECASE)
AVERAGE = re.compile(r"average training time: ([\d.eE+-]+) s/batch")


class Line(NamedTuple):
    """What a program printed, and its time until then."""

    text: str
    when: float  # s since the start
    cpu: float  # s of CPU time


def cpu_seconds(pid: int) -> float:
    """CPU time of a running process with all its threads."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def spawn(args: list[str], folder: Path, env: dict[str, str]) -> tuple[list[Line], float]:
    """Run a program; its lines, and its peak memory (MB)."""
    start = time.perf_counter()
    child = subprocess.Popen(args, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout
    lines = [Line(line.rstrip(), time.perf_counter() - start, cpu_seconds(child.pid)) for line in child.stdout]
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = "\n".join(line.text for line in lines[-30:])
        raise SystemExit(f"{' '.join(args)} in {folder} ended with code {child.returncode}:\n{tail}")
    return lines, usage.ru_maxrss / 1024


def train(name: str, config: dict, folder: Path, threads: int, options: list[str] | None = None) -> Run:
    """`dp train` of one program in its own process and folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "input.json").write_text(json.dumps(config, indent=1))
    args = [*command(name), "train", *(options or []), "input.json"]
    lines, peak = spawn(args, folder, environment(name, threads))
    first: dict[int, Line] = {}  # step -> its first line
    for line in lines:
        if match := ROW.search(line.text):
            first.setdefault(int(match[1]), line)
    own = [float(m[1]) for line in lines if (m := AVERAGE.search(line.text))]
    display = config["training"]["disp_freq"]
    rows = [(step, line) for step, line in sorted(first.items()) if step >= display]  # the first interval is warm-up
    if len(rows) < 2 or not own:
        raise SystemExit(f"{LABEL[name]}: fewer than two display rows or no average training time in the log")
    return Run(
        wall_step=median((b.when - a.when) / (m - n) for (n, a), (m, b) in pairwise(rows)),
        own_step=own[-1],
        cpu_step=median((b.cpu - a.cpu) / (m - n) for (n, a), (m, b) in pairwise(rows)),
        first_row=min(line.when for line in first.values()),
        peak_mb=peak,
        rmse_f=lcurve(folder / "lcurve.out")["rmse_f_trn"][-1],
    )


def test_errors(name: str, folder: Path, system: Path, threads: int) -> tuple[float, float]:
    """Freeze what was trained in a folder and `dp test` it: force RMSE (eV/Å), energy RMSE (meV/atom)."""
    env, model = environment(name, threads), {"ours": "model.dp", "tf": "model.pb", "pt": "model.pth"}[name]
    spawn([*command(name), "freeze", "-o", model], folder, env)
    lines, _ = spawn([*command(name), "test", "-m", model, "-s", str(system)], folder, env)
    text = "\n".join(line.text for line in lines)
    force, energy = re.search(r"Force\s+RMSE\s*:\s*(\S+)", text), re.search(r"Energy RMSE/Natoms\s*:\s*(\S+)", text)
    if not force or not energy:
        raise SystemExit(f"no force or energy error in the output of {LABEL[name]}:\n{text}")
    return float(force[1]), float(energy[1]) * 1e3


def lcurve(path: Path) -> dict[str, np.ndarray]:
    """Columns of lcurve.out by name."""
    header = path.read_text().splitlines()[0].lstrip("# ").split()
    return dict(zip(header, np.atleast_2d(np.loadtxt(path)).T, strict=True))


# --- results -------------------------------------------------------------------------------------------------------
def hardware() -> dict[str, str | int]:
    """CPU, cores in reach, memory, system, date."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions(names: list[str]) -> dict[str, str]:
    """Version of each program and of the library under it."""
    packages = {"ours": ["allforce", "torch"], "tf": ["deepmd-kit", "tensorflow-cpu"], "pt": ["deepmd-kit", "torch"]}
    code = "import sys, importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    found = {}
    for n in names:
        out = subprocess.run([python_of(n), "-c", code, *packages[n]], capture_output=True, text=True, check=False)
        found[n] = out.stdout.strip() or "not installed as a package"
    return found


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table that reads well as text, too."""
    cells = [header, *rows]
    width = [max(len(r[k]) for r in cells) for k in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, width, strict=True)) + " |" for r in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]])


def write_result(name: str, title: str, body: str, data: dict, programs: list[str]) -> None:
    """Print a result and keep it as benchmarks/results/<name>.md and .json."""
    machine, used = hardware(), versions(programs)
    where = "{cpu}, {cores} cores, {memory_gib} GiB; {system}; {date}".format(**machine)
    who = "\n".join(f"- {LABEL[n]}: {used[n]}" for n in programs)
    script = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = f"# {title}\n\n{where}\n\n{who}\n\n{body}\n\nMade by: `python {script}`\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"hardware": machine, "versions": used, **data}, indent=1) + "\n")
    print("\n" + text, flush=True)
