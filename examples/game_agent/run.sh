#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Collect, train, export, play: a model with random weights learns to play a game in a browser.
# All output goes to FOLDER; arguments are passed to the trainer: run.sh [a.b=c ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

FOLDER=$(realpath -m "${FOLDER:-outputs/game_agent}")
GAMES=${GAMES:-20}

python3 examples/game_agent/collect.py "${FOLDER}" train --games 120 --first-seed 0
python3 examples/game_agent/collect.py "${FOLDER}" val --games 20 --first-seed 500000
python3 -c "from verl.models.tiny import save_tiny_model; save_tiny_model('${FOLDER}/model', 'qwen2_5_vl')"

python3 -m verl.trainer.main config=examples/game_agent/train.yaml \
    data.train_files="${FOLDER}/train.jsonl" \
    data.val_files="${FOLDER}/val.jsonl" \
    data.image_dir="${FOLDER}/images" \
    worker.actor.model.model_path="${FOLDER}/model" \
    trainer.save_checkpoint_path="${FOLDER}/checkpoints" \
    trainer.find_last_checkpoint=false \
    "$@"

STEP=$(python3 -c "import json; print(json.load(open('${FOLDER}/checkpoints/checkpoint_tracker.json'))['last_global_step'])")
python3 scripts/model_merger.py --local_dir "${FOLDER}/checkpoints/global_step_${STEP}/actor"

echo "random clicks:" && python3 examples/game_agent/play.py random --games "${GAMES}"
echo "before training:" && python3 examples/game_agent/play.py "${FOLDER}/model" --games "${GAMES}" --film "${FOLDER}/before.gif"
echo "after training:" && python3 examples/game_agent/play.py \
    "${FOLDER}/checkpoints/global_step_${STEP}/actor/huggingface" --games "${GAMES}" --film "${FOLDER}/after.gif"
