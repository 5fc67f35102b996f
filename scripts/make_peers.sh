#!/usr/bin/env bash
# Environments of DeePMD-kit 3.2.0 for the benchmarks and the interop tests: .peers/tf and .peers/pt (git-ignored).
#
#   scripts/make_peers.sh [tf] [pt]        default: both; one that exists is left as it is
#
# ALLFORCE_PEER_TF and ALLFORCE_PEER_PT name existing environments to use instead (a link is made).
# The PyTorch side is several GB because DeePMD-kit's compiled parts need exactly this release of torch, whose build on the
# package index carries CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.2.0

make_one() { # name, path of an existing environment or "", packages...
    local name=$1 existing=$2 target=.peers/$1
    shift 2
    if [ -x "$target/bin/dp" ]; then
        echo "$target: present"
    elif [ -n "$existing" ]; then
        [ -x "$existing/bin/dp" ] || { echo "$existing has no bin/dp" >&2; exit 1; }
        mkdir -p .peers && ln -sfn "$existing" "$target"
        echo "$target -> $existing"
    else
        rm -rf "$target" "$target.part"
        "${PYTHON:-python3}" -m venv "$target"
        "$target/bin/pip" install --quiet --disable-pip-version-check "$@" || { rm -rf "$target"; exit 1; }
        echo "$target: made"
    fi
    "$target/bin/dp" --version 2>/dev/null | tail -n 1
}

for name in "${@:-tf pt}"; do
    for each in $name; do
        case $each in
            tf) make_one tf "${ALLFORCE_PEER_TF:-}" "deepmd-kit[lmp]==$version" tensorflow-cpu ase ;;
            pt) make_one pt "${ALLFORCE_PEER_PT:-}" "deepmd-kit[torch]==$version" mpich torch==2.11.0 ase ;;
            *) echo "usage: scripts/make_peers.sh [tf] [pt]" >&2; exit 2 ;;
        esac
    done
done
