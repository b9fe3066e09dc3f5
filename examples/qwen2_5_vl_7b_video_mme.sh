#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Validates a model on Video-MME, by category, without training; see docs/evaluate.md.
set -ex

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub name or a local folder
VIDEO_DIR=${VIDEO_DIR:-.}  # contains data/, the videos of the data set, downloaded separately
[[ ${1:-a=b} == *=* || $1 == -* ]] || { VIDEO_DIR=$1; shift; }  # or the first argument
VAL_FILE=data/video_mme/test.parquet

python3 scripts/convert_data.py video_mme --input lmms-lab/Video-MME@test --output ${VAL_FILE}

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files= \
    data.val_files=${VAL_FILE} \
    data.category_keys=[duration,domain,task_type] \
    data.video_key=videos \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.format_prompt=./examples/format_prompt/r1v_video.jinja \
    data.max_prompt_length=16384 \
    data.max_response_length=2048 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.num_video_frames=128 \
    worker.rollout.tokens_per_frame=60 \
    worker.rollout.max_num_batched_tokens=32768 \
    worker.rollout.val_override_config.temperature=0 \
    worker.reward.reward_function=./examples/reward_function/choice.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_7b_video_mme \
    trainer.n_gpus_per_node=8 \
    trainer.val_only=true \
    "$@"
