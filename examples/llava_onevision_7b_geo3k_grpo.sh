#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-llava-hf/llava-onevision-qwen2-7b-ov-hf}  # a hub name or a local folder

# An image of 589,824 pixels is at most 5,900 tokens, a square one 3,700.
python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    data.max_prompt_length=6144 \
    data.max_pixels=589824 \
    worker.actor.model.model_path=${MODEL_PATH} \
    trainer.experiment_name=llava_onevision_7b_geo_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
