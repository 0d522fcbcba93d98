#!/usr/bin/env bash
# Checks and times the shadow kernels on a machine with one GPU; needs torch 2.11 or later with its Triton, and nothing
# of ours installed. Ends within eight minutes; what did not fit is listed as skipped, never guessed.
#
#   benchmarks/gpu.sh [FOLDER]              results as JSON in FOLDER (default: benchmarks/results)
#   benchmarks/gpu.sh --rehearse [FOLDER]   the same steps on the CPU: kernels through Triton's interpreter, small sizes
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1
exec "${PYTHON:-python3}" benchmarks/kernels/gpu_check.py "$@"
