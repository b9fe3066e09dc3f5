#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train in whole games: a model with random weights plays in a browser that runs next to each engine.
# All output goes to FOLDER; arguments are passed to the trainer: run_env.sh [a.b=c ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

FOLDER=$(realpath -m "${FOLDER:-outputs/game_agent_env}")

python3 examples/game_agent/prepare_env.py "${FOLDER}" --games "${GAMES:-100}"
python3 -m verl.trainer.main config=examples/game_agent/train_env.yaml \
    data.train_files="${FOLDER}/train.jsonl" \
    data.val_files="${FOLDER}/val.jsonl" \
    worker.actor.model.model_path="${FOLDER}/model" \
    trainer.save_checkpoint_path="${FOLDER}/checkpoints" \
    trainer.find_last_checkpoint=false \
    "$@"
