#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Two stages: supervised fine-tuning on reasoning about long videos, then reinforcement learning from its result.
set -ex

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}  # a hub name or a local folder
QUESTIONS=LongVideo-Reason/longvideo-reason  # on the hub, see docs/datasets.md
VIDEO_DIR=${VIDEO_DIR:-.}  # contains longvila_videos/, downloaded separately; rows with missing videos are left out
[[ ${1:-a=b} == *=* || $1 == -* ]] || { VIDEO_DIR=$1; shift; }  # or the first argument
SFT_FILE=data/longvideo_reason/sft.parquet  # rows of the first stage, see docs/sft.md
RL_FILE=data/longvideo_reason/rl.parquet
VAL_FILE=data/longvideo_reason/val.parquet
STAGE_1=checkpoints/sft/qwen2_5_vl_3b_video  # checkpoints of the first stage

python3 scripts/convert_data.py longvideo_reason --input "${QUESTIONS}@train[:33%]" --output ${SFT_FILE}
python3 scripts/convert_data.py longvideo_reason --input "${QUESTIONS}@train[33%:]" --output ${RL_FILE}
python3 scripts/convert_data.py longvideo_reason --input "${QUESTIONS}@validation" --output ${VAL_FILE}

python3 -m verl.trainer.sft \
    config=examples/sft.yaml \
    data.train_files=${SFT_FILE} \
    data.val_files="" \
    data.prompt_key=problem \
    data.format_prompt=./examples/format_prompt/r1v.jinja \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.on_bad_row=skip \
    data.max_length=6144 \
    data.num_video_frames=32 \
    data.tokens_per_frame=60 \
    worker.actor.ulysses_size=4 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.freeze_vision_tower=true \
    trainer.save_checkpoint_path=${STAGE_1} \
    trainer.max_steps=500 \
    trainer.max_restarts=3 \
    trainer.val_before_train=false \
    trainer.val_freq=-1

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=${RL_FILE} \
    data.val_files=${VAL_FILE} \
    data.video_key=videos \
    data.video_dir=${VIDEO_DIR} \
    data.cache_dir=outputs/video_frames \
    data.on_bad_row=skip \
    data.format_prompt=./examples/format_prompt/r1v.jinja \
    data.max_prompt_length=4096 \
    worker.actor.ulysses_size=4 \
    worker.actor.model.model_path=${STAGE_1}/global_step_500 \
    worker.rollout.tensor_parallel_size=1 \
    worker.rollout.num_video_frames=32 \
    worker.rollout.tokens_per_frame=60 \
    worker.rollout.max_num_batched_tokens=10240 \
    worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_3b_video_cold_start \
    trainer.n_gpus_per_node=8 \
    trainer.val_before_train=false \
    trainer.val_freq=-1 \
    "$@"
