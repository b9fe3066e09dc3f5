#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.n=1 \
    worker.rollout.tensor_parallel_size=4 \
    algorithm.adv_estimator=remax \
    algorithm.use_kl_loss=false \
    algorithm.kl_penalty=kl \
    algorithm.kl_coef=1e-3 \
    trainer.experiment_name=qwen2_5_7b_math_remax \
    "$@"
