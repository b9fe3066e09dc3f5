# SPDX-License-Identifier: Apache-2.0
"""vLLM on the device of a sharded policy: weight sync, sleep and wake, and a whole run of the command."""

import importlib.util
import math

import pytest
import torch

from benchmarks.gpu.part import token_log_probs
from tests.gpu.alone import run_alone
from tests.helpers.training import QUICKSTART, quickstart_arguments, train
from verl.models.tiny import save_tiny_model

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.nightly("verl/workers/rollout"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55], [60, 61]]
MIB = 2**20


def sync_sleep_wake(folder, device):
    """Responses of the engine before and after it slept, and after the policy changed."""
    import torch.distributed as dist

    from verl.config.model import FSDPConfig, ModelConfig
    from verl.config.rollout import RolloutConfig
    from verl.distributed.fsdp import make_mesh
    from verl.distributed.weights.gathering import full_named_tensors
    from verl.models.hub_names import HubNames
    from verl.workers.model_builder import build_model
    from verl.workers.rollout.engines import build_rollout_engine
    from verl.workers.rollout.interface import EngineSetup, RolloutRequest, SamplingOptions

    assert dist.get_world_size() == 1
    policy = build_model(
        ModelConfig(model_path=str(folder)),
        FSDPConfig(),
        mesh=make_mesh(1, -1, device),
        device=device,
        trainable=True,
    )
    config = RolloutConfig(
        dtype="bf16",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        max_num_batched_tokens=2048,
    )
    engine = build_rollout_engine(config, EngineSetup(str(folder), max_length=256, device=device))
    requests = [RolloutRequest(index, ids) for index, ids in enumerate(PROMPTS)]
    greedy = SamplingOptions(n=1, temperature=0.0, max_tokens=16, ignore_eos=True)

    def sync():
        engine.sync_weights(HubNames(policy.config).convert(full_named_tensors(policy, torch.bfloat16)))
        engine.wake()

    def responses():
        finished = [response for batch in engine.generate(requests, greedy) for response in batch]
        return {response.uid: (response.token_ids, response.log_probs) for response in finished}

    def log_probs_by_policy(answers):
        """Log-probs of the engine's responses by the policy's packed forward pass."""
        found = {}
        for uid, (tokens, _) in answers.items():
            sequence = torch.tensor(PROMPTS[uid] + tokens, device=device)
            with torch.no_grad():
                found[uid] = token_log_probs(policy, sequence, len(PROMPTS[uid]), 1.0).tolist()
        return found

    def free():
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    sync()
    first = responses()
    first_by_policy = log_probs_by_policy(first)
    awake = free() if device == "cuda" else 0
    engine.sleep()
    asleep = free() if device == "cuda" else 0
    sync()
    again = responses()
    engine.sleep()
    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        for parameter in policy.parameters():
            local = parameter.to_local()
            local.add_(torch.randn(local.shape, generator=generator, device=device) * 0.05)
    sync()
    moved = responses()
    return first, first_by_policy, again, moved, log_probs_by_policy(moved), asleep - awake


@pytest.fixture(scope="module")
def engine_story(tmp_path_factory, device):
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")
    return run_alone(sync_sleep_wake, folder, device, device=device)


def mean_difference(answers, by_policy):
    pairs = [
        pair for uid, (_, engine) in answers.items() for pair in zip(engine, by_policy[uid], strict=True)
    ]
    return sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs)


def test_the_engine_says_the_same_after_sleep_sync_and_wake(engine_story):
    first, _, again, *_ = engine_story

    for uid, (tokens, log_probs) in first.items():
        assert again[uid][0] == tokens
        assert again[uid][1] == pytest.approx(log_probs, abs=1e-3)


def test_log_probs_of_engine_and_policy_agree_after_each_sync(engine_story):
    first, first_by_policy, _, moved, moved_by_policy, _ = engine_story

    assert mean_difference(first, first_by_policy) < 0.03  # bfloat16 on both sides
    assert mean_difference(moved, moved_by_policy) < 0.03
    assert mean_difference(moved, first_by_policy) > 0.1  # the weights did change


def test_sleep_gives_the_engines_memory_back(engine_story, device):
    *_, freed = engine_story

    # a fifth of the smallest GPU that vLLM runs on, less what cannot be given back
    assert freed > 1000 * MIB if device == "cuda" else freed == 0


def test_a_tiny_run_trains_and_the_engine_agrees_with_the_trainer(device, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(QUICKSTART))
    from shapes import write_questions

    save_tiny_model(tmp_path / "model", "qwen2_5_vl")
    write_questions(tmp_path, "train", 16, seed=1, with_images=True)
    write_questions(tmp_path, "val", 4, seed=2, with_images=True)
    options = [
        f"trainer.device={device}", "trainer.n_gpus_per_node=1", "trainer.max_steps=2",
        "worker.rollout.dtype=bf16",
        "worker.rollout.gpu_memory_utilization=0.2", "worker.actor.fsdp.mp_param_dtype=bf16",
        "algorithm.disable_kl=false", "algorithm.use_kl_loss=true",
    ]  # fmt: skip

    metrics = train(tmp_path / "run", *quickstart_arguments(tmp_path, tmp_path / "model", *options))

    for step in (1, 2):
        assert metrics[step]["rollout/log_probs_diff_mean"] < 0.05
        assert math.isfinite(metrics[step]["actor/grad_norm"])
        assert metrics[step]["actor/skipped_updates"] == 0
    assert (metrics[1]["perf/max_memory_allocated_gb"] > 0) is (device == "cuda")
