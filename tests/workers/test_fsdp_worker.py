# SPDX-License-Identifier: Apache-2.0
"""Weights that a worker syncs into its rollout engine."""

from contextlib import nullcontext
from copy import copy
from types import SimpleNamespace

import pytest
import torch

from tests.workers.rollout.reference import load_model
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.fsdp_worker import FSDPWorker
from verl.workers.sharded_model import ShardedModel


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy with a frozen vision tower, not sharded."""
    policy = ShardedModel.__new__(ShardedModel)
    policy.model = load_model(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_vl"))
    policy.adapter, policy.tower = None, object()
    policy.loaded = nullcontext
    return policy


def worker_with(policy, *, keeps_weights, engine="vllm"):
    """A worker before its first sync, and the names of the tensors that each sync passes."""
    synced = []
    worker = FSDPWorker.__new__(FSDPWorker)
    worker.policy, worker.hub_names = policy, HubNames(policy.model.config)
    worker.config = SimpleNamespace(rollout=SimpleNamespace(name=engine, dtype="bf16"))
    worker.tower_is_synced = False
    worker.engine = SimpleNamespace(
        keeps_weights=keeps_weights,
        takes_adapter=False,
        sync_weights=lambda tensors: synced.append({name for name, _ in tensors}),
        wake=lambda: None,
        set_rng_state=lambda state: None,
    )
    worker.host = SimpleNamespace(continued=ContinuedSampling(worker.engine))
    return worker, synced


def test_a_frozen_tower_is_synced_once_into_an_engine_that_keeps_it(policy):
    worker, synced = worker_with(policy, keeps_weights=True)

    worker.sync_weights(0)
    worker.sync_weights(0)
    worker._restore(policy, None)  # the tower may be another one
    worker.sync_weights(0)

    tower = {name for name in synced[0] if "visual" in name}
    assert tower and synced[1] == synced[0] - tower
    assert synced[2] == synced[0]


def test_a_frozen_tower_is_synced_each_time_into_an_engine_that_discards_it(policy):
    worker, synced = worker_with(policy, keeps_weights=False)

    worker.sync_weights(0)
    worker.sync_weights(0)

    assert synced[1] == synced[0]


def test_a_trained_tower_is_always_synced(policy):
    trained = ShardedModel.__new__(ShardedModel)
    trained.model, trained.adapter, trained.tower = policy.model, None, None

    names = [name for name, _ in trained.engine_tensors(torch.float32, with_tower=False)]

    assert any(name.startswith("model.visual.") for name in names)


@pytest.mark.parametrize("engine, stays_joint", [("vllm", True), ("hf", False)])
def test_experts_are_sent_as_stacks_to_engines_that_read_them(policy, tmp_path, engine, stays_joint):
    mixture = copy(policy)
    mixture.model, mixture.tower = load_model(save_tiny_model(tmp_path, "qwen3_moe")), None
    mixture.engine_tower = None
    worker, synced = worker_with(mixture, keeps_weights=True, engine=engine)

    worker.sync_weights(0)

    joint, single = (
        "model.layers.0.mlp.experts.down_proj[0:4]",
        "model.layers.0.mlp.experts.3.down_proj.weight",
    )
    assert (joint in synced[0]) is stays_joint and (single in synced[0]) is not stays_joint
