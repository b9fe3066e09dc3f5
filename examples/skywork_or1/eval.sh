#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Average accuracy on AIME 2024 and 2025 (32 responses) and LiveCodeBench (4), as Skywork-OR1 reports them:
#
#     MODEL_PATH=checkpoints/easy_r1/skywork_or1_7B_32768/global_step_660 bash examples/skywork_or1/eval.sh
#     LIVECODEBENCH=downloads/test6.jsonl bash examples/skywork_or1/eval.sh
set -x

MODEL_PATH=${MODEL_PATH:-Skywork/Skywork-OR1-7B}  # a hub name, a folder or a checkpoint
LIVECODEBENCH=${LIVECODEBENCH:-}  # a file of livecodebench/code_generation_lite
TEMPERATURE=${TEMPERATURE:-0.6}
DATA_DIR=${DATA_DIR:-data/skywork_or1}

evaluate() {
    verl-eval config=examples/config.yaml \
        --model ${MODEL_PATH} \
        data.train_files= \
        data.max_prompt_length=4096 \
        data.max_response_length=32768 \
        worker.rollout.max_num_batched_tokens=36864 \
        worker.rollout.val_override_config.temperature=${TEMPERATURE} \
        "$@"
}

evaluate --samples 32 --k 1 --by source --out evaluations/aime \
    data.val_files= \
    data.sources.aime24.val_files=HuggingFaceH4/aime_2024@train \
    data.sources.aime25.val_files=math-ai/aime25@test \
    data.format_prompt=examples/skywork_or1/prompt.jinja \
    worker.reward.reward_function_kwargs.format_weight=0 \
    "$@"

if [ -n "${LIVECODEBENCH}" ]; then
    python3 scripts/convert_data.py livecodebench \
        --input "${LIVECODEBENCH}" --output "${DATA_DIR}/livecodebench.parquet"
    evaluate --samples 4 --k 1 --by sub_category --out evaluations/livecodebench \
        data.val_files="${DATA_DIR}/livecodebench.parquet" \
        data.format_prompt=null \
        worker.reward.reward_function=examples/reward_function/code.py:compute_score \
        "$@"
fi
