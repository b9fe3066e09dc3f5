#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -x

MODEL_PATH=${MODEL_PATH:-zai-org/GLM-4.1V-9B-Thinking}  # a hub name or a local folder

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.rollout.tensor_parallel_size=2 \
    trainer.experiment_name=glm4v_9b_geo_grpo \
    trainer.n_gpus_per_node=8 \
    "$@"
