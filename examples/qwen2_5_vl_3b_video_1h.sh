#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub name or a local folder
VIDEO_DIR=${VIDEO_DIR:-.}  # base folder of relative video paths in the rows
[[ ${1:-a=b} == *=* || $1 == -* ]] || { VIDEO_DIR=$1; shift; }  # or the first argument

# One frame per second of an hour: two frames share their tokens, 1800 x 60 = 108000 tokens per video.
python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=LongVideo-Reason/longvideo-reason@train \
    data.val_files=LongVideo-Reason/longvideo-reason@validation \
    data.video_key=videos \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.format_prompt=./examples/format_prompt/r1v_video.jinja \
    data.max_prompt_length=112000 \
    data.rollout_batch_size=8 \
    data.num_workers=1 \
    worker.actor.global_batch_size=8 \
    worker.actor.micro_batch_size_per_device_for_update=1 \
    worker.actor.micro_batch_size_per_device_for_experience=1 \
    worker.actor.ulysses_size=8 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.num_video_frames=3600 \
    worker.rollout.tokens_per_frame=60 \
    worker.rollout.max_num_batched_tokens=131072 \
    worker.rollout.gpu_memory_utilization=0.4 \
    worker.rollout.tensor_parallel_size=1 \
    worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_video_1h \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=1 \
    trainer.val_before_train=false \
    trainer.val_freq=-1 \
    "$@"
