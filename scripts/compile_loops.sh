#!/usr/bin/env bash
# Compile the loops of training and prediction ahead, in both precisions: most of a minute each, once on a machine, that
# the first training would wait for. For an input of your own: dp train --dry-run input.json
#
#   scripts/compile_loops.sh .venv/bin/python
#
# One after the other: two processes that write to numba's cache at a time may take each other's files for their own.
set -euo pipefail
cd "$(dirname "$0")/../examples/water"
python=$(cd "$OLDPWD" && realpath -s "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for precision in float32 float64; do
    sed "s/\"seed\": 1\$/\"seed\": 1, \"precision\": \"$precision\"/" input.json > "$work/input.json"
    PYTHONDONTWRITEBYTECODE= "$python" -m allforce train --dry-run --recipe "$work/input.json" > "$work/log" 2>&1 ||
        { cat "$work/log" >&2; exit 1; }
done
