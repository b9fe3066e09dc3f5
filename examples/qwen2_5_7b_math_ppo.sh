#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.critic.model.model_path=${MODEL_PATH} \
    worker.critic.global_batch_size=128 \
    worker.critic.micro_batch_size_per_device_for_update=1 \
    worker.critic.micro_batch_size_per_device_for_experience=2 \
    worker.critic.optim.lr=1e-5 \
    worker.critic.offload.offload_params=auto \
    worker.critic.offload.offload_optimizer=auto \
    worker.rollout.n=1 \
    worker.rollout.tensor_parallel_size=4 \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_loss=false \
    algorithm.kl_penalty=kl \
    algorithm.kl_coef=1e-3 \
    trainer.critic_warmup=5 \
    trainer.experiment_name=qwen2_5_7b_math_ppo \
    "$@"
