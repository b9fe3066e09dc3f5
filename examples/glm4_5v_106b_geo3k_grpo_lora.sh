#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-zai-org/GLM-4.5V}  # a hub name or a local folder; zai-org/GLM-4.6V is the same model

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    data.apply_chat_template_kwargs.enable_thinking=false \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.lora.rank=32 \
    worker.actor.fsdp.torch_dtype=bf16 \
    worker.actor.fsdp.expert_parallel_size=2 \
    worker.actor.optim.lr=1e-5 \
    worker.rollout.tensor_parallel_size=8 \
    trainer.experiment_name=glm4_5v_106b_geo_grpo_lora \
    trainer.n_gpus_per_node=8 \
    "$@"
