#!/usr/bin/env bash
# System packages of the launch tests that start a real Slurm and two network namespaces (Debian, Ubuntu; as root).
set -euo pipefail
missing=0
for tool in srun slurmctld slurmd munged ip cmake g++ make; do command -v $tool >/dev/null || missing=1; done
[ $missing = 0 ] && exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends slurm-wlm munge iproute2 cmake g++ make
