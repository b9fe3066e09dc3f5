#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder
TEACHER_PATH=Qwen/Qwen2.5-32B-Instruct

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.n=4 \
    algorithm.disable_kl=true \
    distillation.enabled=true \
    distillation.teacher_models.qwen.model_path=${TEACHER_PATH} \
    distillation.teacher_models.qwen.offload.offload_params=auto \
    distillation.distillation_loss.loss_mode=reverse_kl \
    distillation.distillation_loss.use_task_rewards=false \
    trainer.experiment_name=qwen2_5_7b_math_distill \
    "$@"
