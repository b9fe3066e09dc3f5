#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-stabilityai/stable-diffusion-3.5-medium}  # a hub name or a local folder
PROMPTS=nateraw/parti-prompts  # a hub name or a file; rows with a column `Prompt`, others reach the reward function

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=${PROMPTS}@train[64:] \
    data.val_files=${PROMPTS}@train[:64] \
    data.prompt_key=Prompt \
    data.answer_key=Category \
    data.format_prompt=null \
    data.max_prompt_length=128 \
    data.rollout_batch_size=48 \
    algorithm.use_kl_loss=true \
    algorithm.kl_penalty=flow_grpo \
    algorithm.kl_coef=0.02 \
    algorithm.rollout_correction.bypass_mode=true \
    worker.actor.global_batch_size=24 \
    worker.actor.micro_batch_size_per_device_for_update=8 \
    worker.actor.micro_batch_size_per_device_for_experience=16 \
    worker.actor.clip_ratio_low=1e-4 \
    worker.actor.clip_ratio_high=1e-4 \
    worker.actor.optim.lr=3e-4 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.lora.rank=32 \
    worker.actor.model.lora.alpha=64 \
    worker.rollout.n=16 \
    worker.rollout.tensor_parallel_size=1 \
    worker.rollout.resolution=512 \
    worker.rollout.num_steps=10 \
    worker.rollout.guidance_scale=4.5 \
    worker.rollout.val_num_steps=40 \
    worker.reward.reward_function=./examples/reward_function/jpeg_size.py:compute_score \
    trainer.diffusion=true \
    trainer.experiment_name=sd3_flow_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
