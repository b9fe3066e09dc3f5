#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Mathematics with a Python sandbox, whose variables stay from call to call.
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.format_prompt=./examples/format_prompt/python_tool.jinja \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.multi_turn.enable=true \
    worker.rollout.multi_turn.tools=[python] \
    worker.rollout.multi_turn.max_assistant_turns=8 \
    worker.rollout.multi_turn.tool_timeout_s=30 \
    worker.rollout.gpu_memory_utilization=0.85 \
    worker.rollout.tensor_parallel_size=1 \
    worker.reward.reward_function=./examples/reward_function/math.py:compute_score \
    worker.reward.reward_function_kwargs='{"format_weight": 0.0}' \
    trainer.experiment_name=qwen3_4b_python_tool \
    "$@"
