#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.reward.reward_function=./examples/reward_function/llm_judge.py:compute_score \
    worker.reward.reward_function_kwargs='{"base_url":"http://localhost:8000/v1","model":"Qwen/Qwen3-8B","cache_dir":"outputs/judge"}' \
    worker.reward.num_cpus=2 \
    worker.reward.max_concurrency=32 \
    trainer.experiment_name=qwen2_5_7b_math_llm_judge \
    "$@"
