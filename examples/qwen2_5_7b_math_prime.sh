#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.entropy_coef=0.001 \
    worker.prime.global_batch_size=128 \
    worker.prime.micro_batch_size_per_device_for_update=1 \
    worker.prime.micro_batch_size_per_device_for_experience=2 \
    worker.prime.offload.offload_params=auto \
    worker.prime.offload.offload_optimizer=auto \
    worker.rollout.n=4 \
    algorithm.adv_estimator=prime \
    algorithm.disable_kl=true \
    algorithm.online_filtering=true \
    algorithm.filter_key=accuracy \
    algorithm.filter_low=0.2 \
    algorithm.filter_high=0.8 \
    trainer.experiment_name=qwen2_5_7b_math_prime \
    "$@"
