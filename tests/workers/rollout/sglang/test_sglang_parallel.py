# SPDX-License-Identifier: Apache-2.0
"""An SGLang engine cut over two tensor-parallel ranks."""

import pytest

from tests.helpers.distributed import run_distributed
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    largest_difference,
    load_model,
    needs_engine,
    rollout_config,
    setup_of,
    text_requests,
)
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions

pytestmark = [pytest.mark.heavy, needs_engine("sglang")]


def roll_out(rank, world_size, path):
    """Return one rank's tokens after each of two syncs, and its largest log-prob error."""
    engine = build_rollout_engine(rollout_config(name="sglang", tensor_parallel_size=2), setup_of(path))
    model = load_model(path)
    sampled, differences = [], []
    for seed in (1, 2):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        responses = collect(engine, text_requests(), SamplingOptions(n=2, temperature=0.7, max_tokens=16))
        sampled.append({key: response.token_ids for key, response in responses.items()})
        differences.append(largest_difference(model, text_requests(), responses, temperature=0.7))
    engine.close()
    return sampled, max(differences)


def test_tensor_parallel_ranks_return_the_same_responses_with_the_models_log_probs(tmp_path):
    path = save_tiny_model(tmp_path, "deepseek")  # its head is not tied, so it is cut as well

    (first, difference), (second, other) = run_distributed(roll_out, 2, path)

    assert first == second
    assert max(difference, other) < 1e-4
