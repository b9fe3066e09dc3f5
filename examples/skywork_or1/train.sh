#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A stage of Skywork-OR1: mathematics and programming, 8k tokens, then 16k and 32k from the checkpoint before:
#
#     bash examples/skywork_or1/train.sh
#     MODEL_PATH=checkpoints/easy_r1/skywork_or1_7b_8192/global_step_740 LENGTH=16384 bash examples/skywork_or1/train.sh
#     SIZE=32B bash examples/skywork_or1/train.sh worker.rollout.tensor_parallel_size=2 trainer.nnodes=8
set -x

SIZE=${SIZE:-7B}
LENGTH=${LENGTH:-8192}  # of responses; 16384 and 32768 are the next stages
MODEL_PATH=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-${SIZE}}  # a hub name, a folder or a checkpoint
DATA_DIR=${DATA_DIR:-data/skywork_or1}
ANSWERS="{function: examples/reward_function/math.py:compute_score, format_weight: 0}"

for SUBJECT in math code; do
    if [ ! -e "${DATA_DIR}/${SUBJECT}_${SIZE}.parquet" ]; then
        python3 scripts/convert_data.py "skywork_or1_${SIZE,,}" \
            --input "Skywork/Skywork-OR1-RL-Data@${SUBJECT}" \
            --output "${DATA_DIR}/${SUBJECT}_${SIZE}.parquet"
    fi
done

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files= \
    data.val_files= \
    data.sources.math.train_files="${DATA_DIR}/math_${SIZE}.parquet" \
    data.sources.math.weight=4 \
    data.sources.code.train_files="${DATA_DIR}/code_${SIZE}.parquet" \
    data.sources.aime24.val_files=HuggingFaceH4/aime_2024@train \
    data.sources.aime25.val_files=math-ai/aime25@test \
    data.format_prompt=examples/skywork_or1/prompt.jinja \
    data.max_prompt_length=2048 \
    data.max_response_length=${LENGTH} \
    data.rollout_batch_size=256 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.global_batch_size=256 \
    worker.actor.optim.lr=1e-6 \
    worker.actor.entropy_coef=0 \
    worker.actor.adaptive_entropy.enabled=true \
    worker.actor.adaptive_entropy.target_entropy=0.2 \
    worker.rollout.n=16 \
    worker.rollout.gpu_memory_utilization=0.8 \
    worker.rollout.max_num_batched_tokens=$((LENGTH + 2048)) \
    worker.rollout.val_override_config='{temperature: 0.6, n: 8}' \
    worker.reward.reward_function=examples/reward_function/by_source.py:compute_score \
    worker.reward.reward_function_kwargs="{functions: {math: ${ANSWERS}, aime24: ${ANSWERS}, aime25: ${ANSWERS}, code: examples/reward_function/code.py:compute_score}}" \
    algorithm.disable_kl=true \
    algorithm.filter_key=accuracy \
    trainer.rejection_sample=true \
    trainer.rejection_sample_multiplier=1 \
    trainer.val_freq=20 \
    trainer.save_freq=20 \
    trainer.experiment_name="skywork_or1_${SIZE}_${LENGTH}" \
    "$@"
