#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-OpenGVLab/InternVL3-8B-hf}  # a hub name or a local folder, in transformers' own format

# An image is up to 13 tiles of 256 tokens.
python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    data.max_prompt_length=4096 \
    worker.actor.model.model_path=${MODEL_PATH} \
    trainer.experiment_name=internvl3_8b_geo_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
