#!/usr/bin/env bash
# System packages of the tests that start a real Slurm, two network namespaces and a browser (Debian, Ubuntu; as root).
set -euo pipefail
missing=0
for tool in srun slurmctld slurmd munged ip cmake g++ make chromium chromedriver; do command -v $tool >/dev/null || missing=1; done
[ $missing = 0 ] && exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends slurm-wlm munge iproute2 cmake g++ make \
    chromium chromium-driver
