#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder
REWARD_MODEL_PATH=Skywork/Skywork-Reward-V2-Qwen3-1.7B  # a sequence-classification model

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.reward_model.model.model_path=${REWARD_MODEL_PATH} \
    worker.reward_model.micro_batch_size_per_device=4 \
    worker.reward_model.coef=0.1 \
    worker.reward_model.offload.offload_params=auto \
    trainer.experiment_name=qwen2_5_7b_math_reward_model \
    "$@"
