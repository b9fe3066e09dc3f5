#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Three tasks at once: geometry, counting objects, and questions about two images, four to one to one.
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}  # a hub name or a local folder
ANSWERS=examples/reward_function/r1v.py:compute_score

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files= \
    data.val_files= \
    data.sources.geometry.train_files=hiyouga/geometry3k@train \
    data.sources.geometry.val_files=hiyouga/geometry3k@test \
    data.sources.geometry.weight=4 \
    data.sources.counting.train_files=BUAADreamer/clevr_count_70k@train \
    data.sources.counting.val_files=BUAADreamer/clevr_count_70k@test \
    data.sources.pairs.train_files=hiyouga/journeybench-multi-image-vqa@train \
    data.sources.pairs.val_files=hiyouga/journeybench-multi-image-vqa@test \
    data.format_prompt=./examples/format_prompt/vl_mixture.jinja \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.limit_images=2 \
    worker.reward.reward_function=./examples/reward_function/by_source.py:compute_score \
    worker.reward.reward_function_kwargs="{functions: {geometry: examples/reward_function/math.py:compute_score, counting: ${ANSWERS}, pairs: ${ANSWERS}}}" \
    algorithm.online_filtering=true \
    algorithm.filter_key=accuracy \
    trainer.experiment_name=qwen2_5_vl_7b_mixture \
    trainer.n_gpus_per_node=8 \
    "$@"
