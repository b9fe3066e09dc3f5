#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub name or a local folder
VIDEO_DIR=${VIDEO_DIR:-.}  # base folder of relative video paths in the rows
[[ ${1:-a=b} == *=* || $1 == -* ]] || { VIDEO_DIR=$1; shift; }  # or the first argument

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=LongVideo-Reason/longvideo-reason@train \
    data.val_files=LongVideo-Reason/longvideo-reason@validation \
    data.video_key=videos \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.format_prompt=./examples/format_prompt/r1v_video.jinja \
    data.max_prompt_length=4096 \
    worker.actor.ulysses_size=4 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.num_video_frames=32 \
    worker.rollout.tokens_per_frame=60 \
    worker.rollout.max_num_batched_tokens=10240 \
    worker.rollout.tensor_parallel_size=1 \
    worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_video_grpo \
    trainer.n_gpus_per_node=8 \
    trainer.val_before_train=false \
    trainer.val_freq=-1 \
    "$@"
