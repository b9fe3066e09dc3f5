# SPDX-License-Identifier: Apache-2.0
"""Whole runs in which the policy is not the only one with adapters: a value model, a process reward model."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, train
from tests.trainer.test_algorithms import REWARD
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.shards import open_shards

RANK, ALPHA = 4, 8
ACTOR = [
    f"worker.actor.model.lora.rank={RANK}",
    f"worker.actor.model.lora.alpha={ALPHA}",
    "worker.actor.optim.lr=1e-2",
    "worker.actor.fsdp.torch_dtype=fp32",
    "worker.rollout.lora_sync=adapter",
]
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "worker.critic.global_batch_size=4",
    f"worker.critic.model.lora.rank={RANK}",
    f"worker.critic.model.lora.alpha={ALPHA}",
    "worker.critic.optim.lr=1e-2",
    "worker.critic.fsdp.mp_param_dtype=fp32",
    "worker.critic.fsdp.torch_dtype=fp32",
]
PRIME = [  # the base of its adapters is in bf16, as by default
    "algorithm.adv_estimator=prime",
    "worker.prime.global_batch_size=4",
    f"worker.prime.model.lora.rank={RANK}",
    f"worker.prime.model.lora.alpha={ALPHA}",
    "worker.prime.optim.lr=1e-2",
    "worker.prime.fsdp.mp_param_dtype=fp32",
]
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("roles"))


def run(folder, name, role, *overrides):
    options = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        f"worker.{role}.model.model_path={folder / 'model'}",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        f"trainer.max_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.save_limit=-1",
    ]
    return train(folder / name, *quickstart_arguments(folder, folder / "model", *options, *overrides))


def resumed(folder, name, role, *overrides):
    """The step after the checkpoint of the second, run again."""
    checkpoint = folder / name / "global_step_2"
    overrides = [*overrides, f"trainer.load_checkpoint_path={checkpoint}"]
    return run(folder, f"{name} resumed", role, *overrides)


def assert_export_is_base_and_adapter(base, role_folder, extra=(), dtype=torch.float32):
    """Compare each exported weight with the base's: equal to the bit, or with its adapter added by hand.

    The base is the one that was trained over: its weights in `dtype`.
    """
    exported = load_file(merge_checkpoint(role_folder, dtype=torch.float32) / "model.safetensors")
    weights = load_file(base / "model.safetensors")
    adapter = load_file(role_folder / "lora_adapter" / "adapter_model.safetensors")
    down = {name.removesuffix(".lora_A.weight"): adapter[name] for name in adapter if ".lora_A." in name}
    assert len(down) == 14, "seven modules in each of two layers"
    assert exported.keys() - weights.keys() == set(extra)
    for name in exported.keys() & weights.keys():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weights[name].to(dtype).float()
        if module in down:
            product = adapter[f"{module}.lora_B.weight"] @ down[module]
            assert product.abs().max() > 1e-3, f"{name} has not learned"
            expected = expected + ALPHA / RANK * product
            torch.testing.assert_close(exported[name], expected, atol=1e-6, rtol=0)
        else:
            assert torch.equal(exported[name], expected), name


def assert_holds_adapters_only(role_folder, extra=()):
    others = {name for name in open_shards(role_folder).names() if ".lora_" not in name}
    assert others == set(extra)


@pytest.fixture(scope="module")
def ppo(folder):
    return run(folder, "ppo", "critic", *ACTOR, *PPO)


@pytest.mark.slow
def test_an_adapted_critic_learns_along_with_an_adapted_policy_that_the_engine_has(ppo):
    for step in range(1, STEPS + 1):
        assert ppo[step]["rollout/log_probs_diff_max"] < 1e-4
        assert ppo[step]["critic/grad_norm"] > 0
    assert ppo[1]["critic/values/mean"] == 0, "its score starts at zero"
    assert ppo[3]["critic/values/mean"] != 0


@pytest.mark.slow
def test_checkpoints_of_both_hold_adapters_and_their_exports_are_base_and_adapter(ppo, folder):
    checkpoint = folder / "ppo" / f"global_step_{STEPS}"

    assert_holds_adapters_only(checkpoint / "actor")
    assert_holds_adapters_only(checkpoint / "critic", extra={"score.weight"})
    assert_export_is_base_and_adapter(folder / "model", checkpoint / "actor")
    assert_export_is_base_and_adapter(folder / "model", checkpoint / "critic", extra={"score.weight"})
    exported = AutoModelForSequenceClassification.from_pretrained(checkpoint / "critic" / "huggingface")
    assert exported.score.weight.abs().max() > 1e-3


@pytest.mark.slow
def test_an_adapted_policy_and_critic_resume_from_a_checkpoint_exactly(ppo, folder):
    # The resumed run has the base from its files; the other one has trained over it for two steps.
    assert learned(resumed(folder, "ppo", "critic", *ACTOR, *PPO)[3]) == learned(ppo[3])


@pytest.fixture(scope="module")
def prime(folder):
    return run(folder, "prime", "prime", *PRIME)


@pytest.mark.slow
def test_the_reference_of_an_adapted_process_reward_model_is_its_own_base(prime, folder):
    # Adapters start at zero, so the model is its reference. Another copy in float32 is off by 1e-4.
    for score in ("score", "score_right", "score_wrong"):
        assert abs(prime[1][f"prime/{score}"]) < 1e-6
    assert prime[1]["prime/dpo_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert prime[1]["prime/grad_norm"] > 0
    assert abs(prime[3]["prime/score"]) > 1e-3
    checkpoint = folder / "prime" / f"global_step_{STEPS}"
    assert_holds_adapters_only(checkpoint / "prime")
    assert_export_is_base_and_adapter(folder / "model", checkpoint / "prime", dtype=torch.bfloat16)


@pytest.mark.slow
def test_an_adapted_process_reward_model_resumes_from_a_checkpoint_exactly(prime, folder):
    assert learned(resumed(folder, "prime", "prime", *PRIME)[3]) == learned(prime[3])
