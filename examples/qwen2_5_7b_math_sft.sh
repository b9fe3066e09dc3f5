#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.sft \
    config=examples/sft.yaml \
    data.train_files=DigitalLearningGmbH/MATH-lighteval@train \
    data.val_files=DigitalLearningGmbH/MATH-lighteval@test \
    data.prompt_key=problem \
    data.response_key=solution \
    data.format_prompt=./examples/format_prompt/math.jinja \
    worker.actor.model.model_path=${MODEL_PATH} \
    trainer.experiment_name=qwen2_5_7b_math_sft \
    "$@"
