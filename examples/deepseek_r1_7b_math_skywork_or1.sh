#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-7B}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.max_response_length=16384 \
    data.rollout_batch_size=256 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.global_batch_size=256 \
    worker.actor.entropy_coef=1e-4 \
    worker.actor.adaptive_entropy.enabled=true \
    worker.actor.adaptive_entropy.target_entropy=0.2 \
    worker.rollout.n=16 \
    worker.rollout.max_num_batched_tokens=18432 \
    worker.rollout.gpu_memory_utilization=0.85 \
    algorithm.disable_kl=true \
    algorithm.filter_key=accuracy \
    trainer.rejection_sample=true \
    trainer.rejection_sample_multiplier=2 \
    trainer.experiment_name=deepseek_r1_7b_math_skywork_or1 \
    "$@"
