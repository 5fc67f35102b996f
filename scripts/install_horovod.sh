#!/usr/bin/env bash
# Build Horovod (PyPI carries its source only) against the installed torch and put it into the environment.
#
#   scripts/install_horovod.sh [PYTHON]        default .venv/bin/python; called by `make horovod`
#
# The wheel is kept in .cache/wheels under the torch and Python version it was built for, so the minutes are spent once.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${1:-.venv/bin/python}
version=0.28.1
tag=$("$python" -c 'import sys, torch; print(f"torch{torch.__version__}-py{sys.version_info[0]}.{sys.version_info[1]}")')
wheels=$root/.cache/wheels/horovod-$version-$tag

if "$python" -c 'import horovod.torch, horovod; assert horovod.__version__ == "'$version'"; assert horovod.torch.gloo_built()' 2>/dev/null; then
    echo "horovod $version is installed"
    exit 0
fi

if ! ls "$wheels"/horovod-*.whl >/dev/null 2>&1; then
    for tool in cmake g++ make; do
        command -v $tool >/dev/null || { echo "building Horovod needs $tool (apt-get install cmake g++ make)" >&2; exit 1; }
    done
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # torch's headers need C++20; Horovod's build asks for an older standard, so the compiler is called through a wrapper.
    cat > "$work/c++20" <<'WRAPPER'
#!/usr/bin/env bash
args=()
for a in "$@"; do case $a in -std=c++*|-std=gnu++*) ;; *) args+=("$a") ;; esac; done
exec g++ "${args[@]}" -std=gnu++20
WRAPPER
    chmod +x "$work/c++20"
    # CMake is asked by Horovod's setup.py for the python on the PATH.
    PATH="$(dirname "$(realpath -s "$python")"):$PATH" CXX="$work/c++20" TMPDIR="$work" \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --no-build-isolation --no-cache-dir --no-deps --wheel-dir "$work/wheels" "horovod==$version"
    mkdir -p "$wheels"
    mv "$work"/wheels/horovod-*.whl "$wheels/"
fi
"$python" -m pip install --no-cache-dir --no-index --no-deps "$wheels"/horovod-*.whl
"$python" -m pip install cloudpickle cffi psutil pyyaml packaging
