#!/usr/bin/env bash
# The first checks on a machine with one GPU: start, values, host syncs, kernels, memory. Under 9 minutes.
#
#     scripts/gpu_first.sh [--out gpu_first.json] [--skip STEP …] [--only STEP …]
#
# Every step runs in a process of its own with a time limit; the JSON is rewritten after each of them.
set -euo pipefail
exec "${PYTHON:-python}" "$(dirname "$0")/gpu_checks.py" first "$@"
