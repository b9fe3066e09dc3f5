#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Rows are checked when they are read, so that a file of millions of them starts in a second: give yours as
# data.train_files=PATH. Rows that cannot be used are left out and listed.
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.streaming=true \
    data.shuffle_buffer=100000 \
    data.on_bad_row=skip \
    worker.actor.model.model_path=${MODEL_PATH} \
    trainer.max_steps=1000 \
    trainer.experiment_name=qwen2_5_7b_math_streaming \
    "$@"
