#!/usr/bin/env bash
# Checks that need two or more GPUs: messages, overlap, hangs, ZeRO. Under 9 minutes.
#
#     scripts/gpu_two.sh [--out gpu_two.json] [--skip STEP …] [--only STEP …]
set -euo pipefail
exec "${PYTHON:-python}" "$(dirname "$0")/gpu_checks.py" two "$@"
