# SPDX-License-Identifier: Apache-2.0
"""vLLM engines on several ranks: independent ones, and one cut over a tensor-parallel group."""

import os
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    finish,
    hub_tensors,
    largest_difference,
    largest_difference_by_version,
    load_model,
    rollout_config,
    setup_of,
    text_references,
    text_requests,
)
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions

pytestmark = pytest.mark.heavy

SHARED_MEMORY = Path("/dev/shm")


def roll_out(rank, world_size, path, tp_size):
    """What one rank sampled in three rollouts, and how far its log-probs are from the model's."""
    engine = build_rollout_engine(
        rollout_config(tensor_parallel_size=tp_size), setup_of(path, dp_rank=rank // tp_size)
    )
    model = load_model(path)
    sampled, differences = [], []
    for seed in (1, 2):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        torch.rand(rank + 1)  # ranks train on different data: their streams part
        training = torch.get_rng_state()
        options = SamplingOptions(n=2, temperature=0.7, max_tokens=16)
        responses = collect(engine, text_requests(), options)
        assert torch.equal(torch.get_rng_state(), training)
        sampled.append({key: response.token_ids for key, response in responses.items()})
        differences.append(largest_difference(model, text_requests(), responses, temperature=0.7))
    responses, difference = change_while_sampling(engine, model)
    sampled.append(responses)
    differences.append(difference)
    engine.close()
    torch.distributed.barrier()  # training's process group outlives the engine
    return sampled, max(differences), torch.get_num_threads(), shared_memory()


def change_while_sampling(engine, model):
    """Tokens of responses that continue with other weights, and how far their log-probs are."""
    sampling, models = ContinuedSampling(engine), [deepcopy(model), model]
    sampling.submit(text_requests(), SamplingOptions(n=2, max_tokens=12, ignore_eos=True))
    sampling.step(5)
    with sampling.interrupted(version=1):
        change_weights(model, seed=3)
        engine.sync_weights(hub_tensors(model))
    responses = finish(sampling)
    assert {tuple(response.versions) for response in responses.values()} == {(0,) * 5 + (1,) * 7}
    difference = largest_difference_by_version(responses, text_references(models, text_requests()))
    return {key: response.token_ids for key, response in responses.items()}, difference


def shared_memory():
    port = os.environ.get("MASTER_PORT", "none")
    return {file.name for file in SHARED_MEMORY.iterdir() if "cpushm" in file.name and port in file.name}


def roll_out_both_ways(rank, world_size, path):
    """First as two engines, then as the two halves of one; the second is built after the first has ended."""
    return [roll_out(rank, world_size, path, tp_size) for tp_size in (1, 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the two ranks found, for each way."""
    # not tied, so that the head is cut as well
    path = save_tiny_model(tmp_path_factory.mktemp("model"), "deepseek")
    by_rank = run_distributed(roll_out_both_ways, 2, path)
    return [[of_rank[way] for of_rank in by_rank] for way in (0, 1)]


@pytest.mark.nightly("verl/distributed")
def test_two_independent_engines_sample_differently_and_agree_with_the_model(results):
    (first, *_), (second, *_) = results[0]

    assert max(difference for _, difference, *_ in results[0]) < 1e-4
    assert first != second
    assert [threads for *_, threads, _ in results[0]] == [1, 1]


@pytest.mark.nightly("verl/distributed")
def test_tensor_parallel_ranks_sample_the_same_and_leave_no_shared_memory(results):
    (first, *_), (second, *_) = results[1]

    assert max(difference for _, difference, *_ in results[1]) < 1e-4
    assert first == second
    assert all(not files for *_, files in results[1])
