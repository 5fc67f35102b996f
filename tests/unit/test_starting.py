"""What a process loads, in which order, and how it ends: each in a process of its own."""

import subprocess
import sys

import pytest


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
    (tmp_path / "needed.py").write_text("print('needed')")
    code = (
        "import inspect, sys; sys.path.insert(0, sys.argv[1])\n"
        "from allforce.later import postpone; postpone({'idle': ('needed',)})\n"
        "import idle, idle.part; inspect.getmodule(inspect.currentframe()); print(hasattr(idle, '__wrapped__'))\n"
        "from idle import one; print(one, idle.two, hasattr(idle, 'three'))"
    )
    assert good(code, str(tmp_path)).split("\n")[:-1] == ["needed", "part", "False", "idle", "1 2 False"]


def test_what_is_not_there_cannot_be_postponed():
    done = run("from allforce.later import postpone; postpone({'no_such_module': ()}); import no_such_module")
    assert done.returncode == 1 and "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr


LOADING = """
import sys

import pytest
from allforce.later import UNUSED, postpone
postpone()
import allforce.train.entry, scipy.linalg.cython_blas, torch
idle = [name for name in UNUSED if "__getattr__" in vars(sys.modules[name])]
"""


def test_unused_modules_are_not_loaded():
    out = good(LOADING + "torch.Generator(); print(sorted(idle) == sorted(UNUSED), torch.randn(3, 3).det().ndim)")
    assert out == "True 0\n"


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
