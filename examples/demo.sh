#!/usr/bin/env bash
# Train the water example, test it, draw its learning curve: all in demo/. Called by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf demo && mkdir demo && cd demo
ln -s ../examples/water/data data
cp ../examples/water/input.json .

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
run dp train --workers 2 input.json -l train.log
run dp freeze -o model.dp
run dp test -m model.dp -s data/valid -d detail
run dp plot lcurve.out -o learning_curve.png
run dp report .

printf '\nWhat is now in demo/:\n'
printf '  %-20s %s\n' report.html 'all about the run, to open in a browser' \
    learning_curve.png 'errors of training and validation, as a picture' \
    lcurve.out 'the same as numbers' train.log 'the log' \
    model.dp 'the trained model, for ASE, for dp test, for DeePMD-kit' \
    'model.ckpt*' 'checkpoints, to go on with: dp train --restart model.ckpt input.json'
