#!/usr/bin/env bash
# Everything that this project can check on a machine with one GPU; gpu_check.py says what and how.
#
#   bash scripts/gpu_check.sh [--call 1|2|3] [--rehearse | --list] [--out DIR]
#
# Needs Python >= 3.12 with torch (PYTHON, else python3), pytest, numpy, nvcc and a C++ compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
