#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Wan-AI/Wan2.1-T2V-1.3B-Diffusers}  # a hub name or a local folder
PROMPTS=nateraw/parti-prompts  # a hub name or a file; rows with a column `Prompt`, others reach the reward function
export CLIP_MODEL_PATH=${CLIP_MODEL_PATH:-clip}  # hf download openai/clip-vit-large-patch14 --local-dir clip

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=${PROMPTS}@train[64:] \
    data.val_files=${PROMPTS}@train[:64] \
    data.prompt_key=Prompt \
    data.answer_key=Category \
    data.format_prompt=null \
    data.max_prompt_length=128 \
    data.rollout_batch_size=16 \
    algorithm.use_kl_loss=true \
    algorithm.kl_penalty=flow_grpo \
    algorithm.kl_coef=0.004 \
    algorithm.rollout_correction.bypass_mode=true \
    worker.actor.global_batch_size=8 \
    worker.actor.micro_batch_size_per_device_for_update=1 \
    worker.actor.micro_batch_size_per_device_for_experience=2 \
    worker.actor.ulysses_size=2 \
    worker.actor.clip_ratio_low=1e-3 \
    worker.actor.clip_ratio_high=1e-3 \
    worker.actor.optim.lr=1e-4 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.lora.rank=32 \
    worker.actor.model.lora.alpha=64 \
    worker.rollout.n=8 \
    worker.rollout.tensor_parallel_size=1 \
    worker.rollout.num_frames=33 \
    worker.rollout.height=240 \
    worker.rollout.width=416 \
    worker.rollout.num_steps=20 \
    worker.rollout.guidance_scale=4.5 \
    worker.rollout.val_num_steps=50 \
    worker.reward.reward_function=./examples/reward_function/clip_score.py:compute_score \
    trainer.diffusion=true \
    trainer.experiment_name=wan2_1_flow_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
