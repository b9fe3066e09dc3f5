# SPDX-License-Identifier: Apache-2.0
"""A step runs the forward passes that its algorithm reads, and no others."""

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.planning.step_needs import StepNeeds

MINIMAL = [
    "data.train_files=owner/rows",
    "data.val_files=owner/rows@test",
    "data.rollout_batch_size=8",
    "worker.actor.model.model_path=owner/model",
    "worker.actor.micro_batch_size_per_device_for_update=2",
    "worker.actor.micro_batch_size_per_device_for_experience=2",
    "worker.rollout.n=2",
    "worker.rollout.tensor_parallel_size=1",
    "trainer.n_gpus_per_node=2",
]
ONE_UPDATE = [
    "worker.actor.global_batch_size=8",
    "worker.critic.global_batch_size=8",
    "algorithm.use_kl_loss=true",
]
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], False),
        ([f"{CORRECTION}.rollout_is=token"], False),
        ([f"{CORRECTION}.bypass_mode=true"], False),
        (["worker.actor.global_batch_size=4"], True),
        (["worker.actor.ppo_epochs=2"], True),
        (["algorithm.use_kl_loss=false"], True),
        (["algorithm.use_kl_loss=false", "algorithm.disable_kl=true"], False),
        (["algorithm.adv_estimator=optimal_token_baseline"], True),
        (["worker.actor.loss_type=clip_cov"], True),
        (["worker.actor.adaptive_entropy.enabled=true"], True),
        (
            [
                "algorithm.adv_estimator=gae",
                "worker.critic.model.model_path=owner/model",
                "trainer.critic_warmup=1",
            ],
            True,
        ),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"], True),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"], True),
    ],
)
def test_a_pass_for_old_log_probs_runs_only_where_something_reads_them_before_the_update(
    options, expected, tmp_path
):
    (reward := tmp_path / "reward.py").write_text("def main(rows): ...")
    files = [f"worker.reward.reward_function={reward}", f"trainer.save_checkpoint_path={tmp_path}/saved"]

    config = load_config(PPOConfig, [*MINIMAL, *files, *ONE_UPDATE, *options])

    assert StepNeeds.of(config).old_pass is expected
