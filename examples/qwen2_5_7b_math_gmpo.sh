#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.loss_type=geo_mean \
    worker.actor.loss_avg_mode=seq \
    worker.actor.clip_ratio_low=0.4 \
    worker.actor.clip_ratio_high=0.4 \
    algorithm.disable_kl=true \
    trainer.experiment_name=qwen2_5_7b_math_gmpo \
    "$@"
