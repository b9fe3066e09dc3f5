#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The first hour on a GPU: kernels, memory, GPU tests, MFU of an update, the engine next to the trainer, a tiny run.
#
#   bash scripts/gpu_check.sh                          everything, in order of value
#   bash scripts/gpu_check.sh --only kernels,engine    some parts; `--help` lists them
#   bash scripts/gpu_check.sh --budget 560             stop after 560 seconds
#   bash scripts/gpu_check.sh --tiny                   the same programs on the CPU, in minutes
#
# Each part is a process with a time limit; one that fails does not stop the others. gpu_check.json, the table
# gpu_check.txt and gpu_check.log are written to --out, to $OUT if it is set, or to gpu_check/. The interpreter is
# $PYTHON, that of .venv, or python3; packages that it lacks are named, and the parts that need them are skipped.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
exec "$python" -m benchmarks.gpu.check "$@"
