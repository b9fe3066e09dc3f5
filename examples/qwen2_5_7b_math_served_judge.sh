#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder
JUDGE_PATH=Qwen/Qwen3-8B  # ranks all responses to a prompt; it sleeps on the same GPUs while others work

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.reward.reward_function=./examples/reward_function/judged.py:compute_score \
    worker.reward.reward_function_kwargs='{"way":"group"}' \
    reward_servers.judge.model_path=${JUDGE_PATH} \
    reward_servers.judge.max_model_len=32768 \
    reward_servers.judge.sampling='{"max_tokens":4096}' \
    worker.reward.num_cpus=2 \
    worker.reward.max_concurrency=32 \
    trainer.experiment_name=qwen2_5_7b_math_served_judge \
    "$@"
