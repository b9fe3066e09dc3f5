#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train a model to use Android devices that `adb devices` lists on the machine of each engine.
# TRAIN and VAL are files of rows with `task`, `app`, `goal_command` and `goal`; other arguments go to the trainer.
# `tool_concurrency` is above the conversations of an engine, since one waiting for a device counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-VL-4B-Instruct}
TRAIN=${TRAIN:-data/android/train.jsonl}
VAL=${VAL:-data/android/val.jsonl}
SERIALS=${SERIALS:-emulator-5554,emulator-5556}

python3 -m verl.trainer.main config=examples/config.yaml \
    data.train_files="${TRAIN}" \
    data.val_files="${VAL}" \
    data.prompt_key=task \
    data.answer_key=goal \
    data.max_prompt_length=4096 \
    data.max_response_length=24576 \
    data.max_pixels=1048576 \
    data.rollout_batch_size=8 \
    algorithm.adv_estimator=turn_grpo \
    worker.actor.model.model_path="${MODEL_PATH}" \
    worker.actor.global_batch_size=8 \
    worker.rollout.n=4 \
    worker.rollout.multi_turn.enable=true \
    worker.rollout.multi_turn.environment=examples/android_agent/env.py:AndroidTask \
    "worker.rollout.multi_turn.environment_kwargs={serials: [${SERIALS}]}" \
    worker.rollout.multi_turn.max_assistant_turns=12 \
    worker.rollout.multi_turn.max_tokens_per_turn=256 \
    worker.rollout.multi_turn.tool_concurrency=64 \
    worker.rollout.multi_turn.tool_timeout_s=3600 \
    worker.reward.reward_function=null \
    trainer.experiment_name=android_agent \
    "$@"
