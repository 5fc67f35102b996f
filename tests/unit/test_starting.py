"""What a process loads, in which order, and how it ends: each in a process of its own."""

import subprocess
import sys

import pytest

from allforce.later import UNUSED


def run(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def good(code: str, *arguments: str) -> str:
    done = run(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_postponed_module_is_loaded_by_its_first_use(tmp_path):
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle" / "__init__.py").write_text("print('idle'); from idle.part import two; one = 1")
    (tmp_path / "idle" / "part.py").write_text("print('part'); two = 2")
    (tmp_path / "idle" / "alone.py").write_text("print('alone')")
    (tmp_path / "needed.py").write_text("print('needed')")
    code = (
        "import inspect, sys; sys.path.insert(0, sys.argv[1])\n"
        "from allforce.later import ALONE, postpone; postpone({'idle': ('needed',)}); ALONE.add('idle.alone')\n"
        "import idle, idle.alone; inspect.getmodule(inspect.currentframe()); print(hasattr(idle, '__wrapped__'))\n"
        "from idle import one; print(one, idle.two, hasattr(idle, 'three'))"
    )
    lines = ["needed", "alone", "False", "idle", "part", "1 2 False"]
    assert good(code, str(tmp_path)).split("\n")[:-1] == lines


POSTPONED = """
import sys; sys.path.insert(0, sys.argv[1])
from allforce.later import FUNCTIONS, postpone
FUNCTIONS["lib.first"] = ("double",)
postpone({"lib.first": (), "lib.second": (), "other": ()})
import lib.first, lib.second, other
from lib.first import double
"""


@pytest.mark.parametrize(
    "use, lines",
    [
        ("lib.second.name", ["first", "second"]),  # in the order in which they were imported
        ("import lib.second.part", ["first", "second", "part"]),  # a package before its part
        ("lib.first.name", ["first"]),
        ("other.name", ["other"]),  # of another package
        ("print(double(3), double is lib.first.double)", ["first", "6 False"]),
        ("hasattr(lib.first, 'nothing'); hasattr(lib.first, 'nothing')", ["first"]),
    ],
)
def test_what_a_use_loads(use, lines, tmp_path):
    (tmp_path / "lib" / "second").mkdir(parents=True)
    (tmp_path / "lib" / "first.py").write_text("print('first'); name = 1\ndef double(x): return 2 * x")
    (tmp_path / "lib" / "second" / "__init__.py").write_text("print('second'); name = 2")
    (tmp_path / "lib" / "second" / "part.py").write_text("print('part')")
    (tmp_path / "other.py").write_text("print('other'); name = 3")
    assert good(POSTPONED + use, str(tmp_path)).split("\n")[:-1] == lines


def test_threads_wait_for_who_loads(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(0.3); name = 1")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from allforce.later import postpone; postpone({'slow': ()})\n"
        "import slow; from multiprocessing.pool import ThreadPool\n"
        "print(ThreadPool(4).map(lambda _: slow.name, range(4), 1))"
    )
    assert good(code, str(tmp_path)) == "[1, 1, 1, 1]\n"


def test_what_is_not_there_cannot_be_postponed():
    done = run("from allforce.later import postpone; postpone({'no_such_module': ()}); import no_such_module")
    assert done.returncode == 1 and "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr


LOADING = """
import sys

import pytest
from allforce.later import UNUSED, OnUse, postpone
postpone()
import allforce.train.entry, scipy.linalg.cython_blas, torch
asked = {name: vars(sys.modules[name]).get("__getattr__") for name in UNUSED}
idle = [name for name, look_up in asked.items() if isinstance(getattr(look_up, "__self__", None), OnUse)]
"""


def test_unused_modules_are_not_loaded():
    used = (
        "torch.Generator(); x = torch.ones(2, 3, requires_grad=True)\n"
        "y = torch.nn.Linear(3, 1).to('cpu')(x).sum(); torch.autograd.grad(y, x, create_graph=True); y.backward()\n"
        "torch.randn(3, 3).det(); str(x)\n"
    )
    for before in ("", used):
        code = LOADING.replace("asked =", before + "asked =") + "print(sorted(set(UNUSED) - set(idle)))"
        assert good(code) == "[]\n"


@pytest.mark.parametrize("name", UNUSED)
def test_any_of_them_can_be_the_first_that_is_used(name):
    """torch's modules import each other in circles, which work in some orders only."""
    code = LOADING + "print(hasattr(sys.modules[sys.argv[1]], 'nothing'))"
    assert good(code, name) == "False\n"


def test_postponed_modules_work_when_they_are_used():
    code = LOADING + (
        "import h5py, scipy.linalg\n"
        "print(scipy.linalg.det([[2.0]]), h5py.File.__name__, callable(torch._meta_registrations.register_meta))\n"
        "print(torch.addbmm(*(torch.empty(s, device='meta') for s in ((2, 4), (5, 2, 3), (5, 3, 4)))).shape)"
    )
    assert good(code) == "2.0 File True\ntorch.Size([2, 4])\n"


LEAVING = """
import atexit, os, sys, threading, time
from allforce.cli import leave
class Late:
    def __del__(self): os.write(1, b"taken apart\\n")
late, ended = Late(), threading.Event()
atexit.register(print, "said goodbye")
print("worked", end=" ")
"""


def test_process_is_left_with_its_code_when_all_is_written_and_said():
    done = run(LEAVING + "leave(3)")
    assert (done.returncode, done.stdout) == (3, "worked said goodbye\n")


@pytest.mark.parametrize("why", ["a thread has work to do", "a tool waits for the end", "nobody reads"])
def test_process_ends_as_always(why):
    code = LEAVING
    if why == "a thread has work to do":
        code += "threading.Thread(target=ended.wait).start()\n"
    elif why == "a tool waits for the end":
        code += "os.environ['LD_PRELOAD'] = ''\n"
    else:
        code += "sys.stdout.flush(); sys.stderr = open('/dev/full', 'w'); sys.stderr.write('x')\n"
    done = run(code + "leave(3); ended.set(); sys.stderr = sys.__stderr__; sys.exit(4)")
    assert done.returncode == 4 and sorted(done.stdout.split("\n")) == ["", "taken apart", "worked said goodbye"]
