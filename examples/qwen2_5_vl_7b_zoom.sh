#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The policy reads diagrams shrunk to 256 tokens, and may enlarge parts of the originals (as DeepEyes does).
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    data.format_prompt=./examples/format_prompt/zoom.jinja \
    data.override_chat_template=./examples/chat_template/qwen_vl_tools.jinja \
    data.min_pixels=3136 \
    data.max_pixels=200704 \
    data.max_prompt_length=2048 \
    data.max_response_length=4096 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.limit_images=6 \
    worker.rollout.multi_turn.enable=true \
    worker.rollout.multi_turn.tools=[zoom] \
    worker.rollout.multi_turn.max_assistant_turns=6 \
    worker.rollout.multi_turn.max_images=6 \
    worker.reward.reward_function=./examples/reward_function/zoom.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_7b_zoom \
    trainer.n_gpus_per_node=8 \
    "$@"
