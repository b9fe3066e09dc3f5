#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Two stages: conversations that reason about videos, then reinforcement learning from what they taught.
set -ex

MODEL_PATH=Qwen/Qwen2.5-VL-3B-Instruct  # a hub name or a local folder
CONVERSATIONS=your-name/video-conversations@train  # rows as docs/sft.md describes them
VIDEO_DIR=.  # the folder that video paths in the rows start from
STAGE_1=checkpoints/sft/qwen2_5_vl_3b_video  # where the first stage is saved

python3 -m verl.trainer.sft \
    config=examples/sft.yaml \
    data.train_files=${CONVERSATIONS} \
    data.val_files="" \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.max_length=6144 \
    data.num_video_frames=32 \
    data.tokens_per_frame=60 \
    worker.actor.ulysses_size=4 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.freeze_vision_tower=true \
    trainer.save_checkpoint_path=${STAGE_1} \
    trainer.max_steps=500 \
    trainer.val_before_train=false \
    trainer.val_freq=-1

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=LongVideo-Reason/longvideo-reason@train \
    data.val_files=LongVideo-Reason/longvideo-reason@validation \
    data.video_key=videos \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.format_prompt=./examples/format_prompt/r1v.jinja \
    data.max_prompt_length=4096 \
    worker.actor.ulysses_size=4 \
    worker.actor.model.model_path=${STAGE_1}/global_step_500 \
    worker.rollout.num_video_frames=32 \
    worker.rollout.tokens_per_frame=60 \
    worker.rollout.max_num_batched_tokens=10240 \
    worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_video_cold_start \
    trainer.n_gpus_per_node=8 \
    trainer.val_before_train=false \
    trainer.val_freq=-1 \
    "$@"
