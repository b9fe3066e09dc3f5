#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The first hour on a GPU: kernels, memory, GPU tests, MFU of an update, the engine next to the trainer, runs.
#
#   bash scripts/gpu_check.sh                          everything that has not passed yet, in order of value
#   bash scripts/gpu_check.sh --only kernels,engine    some parts; `--help` lists them
#   bash scripts/gpu_check.sh --call 1                 the parts of the first of three calls of 280 seconds
#   bash scripts/gpu_check.sh --call 1 --wheels        the packages that they need, for pip
#   bash scripts/gpu_check.sh --tiny                   the same programs on the CPU, in minutes
#
# Each part is a process with a time limit; one that fails does not stop the others. The table gpu_check.txt,
# gpu_check.json, gpu_check.jsonl and gpu_check.log are written to --out, to $OUT if it is set, or to gpu_check/.
# The interpreter is $PYTHON, that of .venv, or python3; packages that it lacks are named, and the parts that
# need them are skipped.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
exec "$python" -m benchmarks.gpu.check "$@"
