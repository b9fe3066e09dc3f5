#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen-Image}  # a hub name or a local folder
PROMPTS=nateraw/parti-prompts  # a hub name or a file; rows with a column `Prompt`, others reach the reward function

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=${PROMPTS}@train[64:] \
    data.val_files=${PROMPTS}@train[:64] \
    data.prompt_key=Prompt \
    data.answer_key=Category \
    data.format_prompt=null \
    data.max_prompt_length=256 \
    data.rollout_batch_size=32 \
    algorithm.disable_kl=true \
    algorithm.rollout_correction.bypass_mode=true \
    worker.actor.global_batch_size=16 \
    worker.actor.micro_batch_size_per_device_for_update=4 \
    worker.actor.micro_batch_size_per_device_for_experience=8 \
    worker.actor.clip_ratio_low=1e-4 \
    worker.actor.clip_ratio_high=1e-4 \
    worker.actor.optim.lr=3e-4 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.lora.rank=64 \
    worker.actor.model.lora.alpha=128 \
    worker.rollout.n=16 \
    worker.rollout.tensor_parallel_size=1 \
    worker.rollout.resolution=512 \
    worker.rollout.num_steps=10 \
    worker.rollout.noise_level=1.2 \
    worker.rollout.sde_window=[1,3] \
    worker.rollout.guidance_scale=4.0 \
    worker.rollout.val_num_steps=50 \
    worker.reward.reward_function=./examples/reward_function/jpeg_size.py:compute_score \
    trainer.diffusion=true \
    trainer.experiment_name=qwen_image_flow_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
