#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Questions of Natural Questions and HotpotQA, answered with a search (as Search-R1 does). First start
# `python3 examples/search_server.py corpus.jsonl`, or another server of this form.
set -x

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}  # a hub name or a local folder
ENDPOINT=http://127.0.0.1:8000/retrieve

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=PeterJinGo/nq_hotpotqa_train@train \
    data.val_files=PeterJinGo/nq_hotpotqa_train@test[:1000] \
    data.prompt_key=question \
    data.answer_key=golden_answers \
    data.format_prompt=./examples/format_prompt/search.jinja \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.multi_turn.enable=true \
    worker.rollout.multi_turn.tools=[search] \
    worker.rollout.multi_turn.tool_kwargs="{search: {endpoint: ${ENDPOINT}}}" \
    worker.rollout.multi_turn.max_assistant_turns=5 \
    worker.rollout.multi_turn.max_tool_response_length=600 \
    worker.rollout.tensor_parallel_size=1 \
    worker.reward.reward_function=./examples/reward_function/search.py:compute_score \
    trainer.experiment_name=qwen2_5_7b_search \
    trainer.n_gpus_per_node=8 \
    "$@"
