#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Long responses with drafts from their own earlier text. With `pip install 'easy-verl[suffix]'`, the method
# `suffix` also drafts from the other responses of a step.
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.max_response_length=8192 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.speculative.method=ngram \
    worker.rollout.speculative.num_tokens=4 \
    trainer.experiment_name=qwen2_5_7b_math_speculative \
    "$@"
