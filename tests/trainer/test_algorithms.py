# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the command on two CPU processes, with every kind of model, filter and correction."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.quickstart import make_folder
from tests.helpers.training import ROOT, learned, quickstart_arguments, start_training, train

pytestmark = pytest.mark.heavy

REWARD = Path(__file__).with_name("scored_by_letters.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("algorithms"), train=24)


def arguments(folder, *overrides):
    common = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "data.max_response_length=6",
    ]
    return quickstart_arguments(folder, folder / "model", *common, *overrides)


def stopped_and_resumed(output, options, steps):
    """The metrics of a run that was stopped half way and of one that was not."""
    unbroken = train(output / "unbroken", *options, f"trainer.max_steps={steps}")
    save = f"trainer.save_freq={steps // 2}"
    train(output / "stopped", *options, f"trainer.max_steps={steps // 2}", save)
    resumed = train(output / "stopped", *options, f"trainer.max_steps={steps}", save)
    return unbroken, resumed


def assert_same(unbroken, resumed, steps):
    """Compare every step; the last one before the stop also validated."""
    for step in steps:
        assert learned(resumed[step]) | learned(unbroken[step]) == learned(resumed[step]), step


@pytest.mark.slow  # three runs
def test_ppo_trains_its_critic_and_resumes_from_a_checkpoint_exactly(folder):
    critic = [
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        f"worker.critic.model.model_path={folder / 'model'}",
        "worker.critic.global_batch_size=4",
        "worker.critic.fsdp.mp_param_dtype=fp32",
        "worker.critic.optim.lr=1e-3",
        "trainer.critic_warmup=2",
    ]
    unbroken, resumed = stopped_and_resumed(folder / "ppo", arguments(folder, *critic), steps=4)

    assert_same(unbroken, resumed, (1, 2, 3, 4))
    names = {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"}
    names |= {"critic/vf_explained_var", "critic/values/mean", "timing_s/values", "timing_s/update_critic"}
    assert names - set(unbroken[1]) == set()
    assert "actor/pg_loss" not in unbroken[1]  # the critic alone
    assert "actor/pg_loss" in unbroken[2]
    assert unbroken[4]["critic/vf_loss"] < unbroken[1]["critic/vf_loss"]

    checkpoint = folder / "ppo" / "unbroken" / "global_step_4" / "critic"
    merge = [sys.executable, str(ROOT / "scripts" / "model_merger.py"), "--local_dir", str(checkpoint)]
    subprocess.run(merge, check=True, capture_output=True)
    exported = AutoModelForSequenceClassification.from_pretrained(checkpoint / "huggingface")
    assert exported.score.weight.shape == (1, exported.config.hidden_size)
    assert exported.score.weight.abs().sum() > 0  # it started at zero


@pytest.mark.slow  # three runs
def test_filtered_prompts_are_carried_over_steps_and_over_a_stop(folder):
    filtering = [
        "algorithm.online_filtering=true",
        "algorithm.filter_key=accuracy",
        "algorithm.filter_low=0.3",
        "algorithm.filter_high=0.9",
        "worker.reward.overlong_buffer_length=2",
    ]
    unbroken, resumed = stopped_and_resumed(folder / "filter", arguments(folder, *filtering), steps=6)

    assert_same(unbroken, resumed, range(1, 7))
    assert any(unbroken[step]["filter/carried_in"] for step in range(1, 7))
    assert any(unbroken[step]["filter/sampled"] > unbroken[step]["filter/kept"] for step in range(1, 7))
    assert all(unbroken[step]["filter/trained"] == 4 for step in range(1, 7))
    assert all("reward/overlong_penalty" in unbroken[step] for step in range(1, 7))


@pytest.mark.slow  # three runs; tests/trainer/rollouts/test_early_stop.py has scripted responses
def test_prompts_that_are_stopped_early_are_not_sampled_on_and_a_resumed_run_stops_the_same(folder):
    stopping = [
        "algorithm.online_filtering=true",
        "algorithm.filter_key=accuracy",
        "algorithm.early_stop.after=2",
        "algorithm.early_stop.keep_probability=0.5",
        "worker.reward.batch_size=1",
        "worker.rollout.n=4",
    ]
    unbroken, resumed = stopped_and_resumed(folder / "early_stop", arguments(folder, *stopping), steps=6)

    assert_same(unbroken, resumed, range(1, 7))
    assert sum(metrics["early_stop/stopped"] for metrics in unbroken.values()) > 0
    assert any(metrics["early_stop/effective_groups"] < 4 for metrics in unbroken.values())
    assert all(metrics["filter/trained"] == 4 for metrics in unbroken.values())


@pytest.mark.slow  # one more run; tests/workers/roles/test_prime.py compares it in every suite
def test_prime_trains_its_process_rewards_along_with_the_policy(folder):
    prime = [
        "algorithm.adv_estimator=prime",
        "worker.prime.global_batch_size=4",
        "worker.prime.fsdp.mp_param_dtype=fp32",
        "worker.prime.optim.lr=1e-3",
        "trainer.rejection_sample=true",
        "trainer.rejection_sample_multiplier=2",
    ]
    metrics = train(folder / "prime", *arguments(folder, *prime), "trainer.max_steps=3")

    assert metrics[1]["prime/dpo_loss"] == pytest.approx(math.log(2), rel=1e-4)  # nothing learned yet
    assert metrics[1]["prime/grad_norm"] > 0
    assert metrics[2]["prime/score"] != 0
    assert metrics[1]["batch/without_adv_ratio"] == 0
    assert (folder / "prime" / "global_step_3" / "prime" / "huggingface" / "config.json").is_file()


@pytest.mark.slow  # one more run
def test_a_reward_model_can_be_the_only_source_of_scores(folder):
    scorer = folder / "scorer"
    shutil.copytree(folder / "model", scorer)
    (scorer / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(scorer)
    options = [
        option
        for option in arguments(folder, "data.val_batch_size=5", "trainer.val_before_train=true")
        if not option.startswith("worker.reward.reward_function=")
    ]
    model = [
        f"worker.reward_model.model.model_path={scorer}",
        "worker.reward_model.coef=2.0",
        "worker.reward_model.fsdp.mp_param_dtype=fp32",
        "trainer.n_gpus_per_node=1",
        "trainer.max_steps=1",
    ]
    metrics = train(folder / "reward_model", *options, *model)

    assert metrics[1]["reward/reward_model"] != 0
    assert metrics[1]["critic/score/mean"] == pytest.approx(2 * metrics[1]["reward/reward_model"], rel=1e-5)
    assert metrics[0]["val/reward_score"] == pytest.approx(
        2 * metrics[0]["val/reward_model_reward"], rel=1e-5
    )


@pytest.mark.slow
def test_remax_with_resampling_corrections_and_the_kl_over_the_vocabulary_in_the_rewards(folder):
    options = [
        "algorithm.adv_estimator=remax",
        "algorithm.use_pf_ppo=true",
        "algorithm.disable_kl=false",
        "algorithm.kl_penalty=full",
        "algorithm.kl_type=adaptive",
        "worker.ref.fsdp.torch_dtype=fp32",
        "worker.ref.fsdp.mp_param_dtype=fp32",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001",
        "worker.actor.adaptive_entropy.enabled=true",
        "worker.actor.adaptive_entropy.target_entropy=100.0",
        "worker.actor.entropy_coef=0.0",
    ]
    unbroken = train(folder / "remax", *arguments(folder, *options), "trainer.max_steps=2")

    assert unbroken[1]["actor/kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert unbroken[2]["actor/kl_penalty"] > 0
    assert unbroken[2]["actor/kl_coef"] < unbroken[1]["actor/kl_coef"]  # adaptive: the KL is below its target
    assert unbroken[1]["actor/entropy_coef"] == pytest.approx(1e-4)  # adaptive: the entropy is, too
    assert unbroken[2]["actor/entropy_coef"] == pytest.approx(2e-4)
    assert unbroken[1]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert unbroken[1]["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert "reward/baseline" in unbroken[1]
    assert "timing_s/ref" not in unbroken[1]  # both models ran in one pass


@pytest.mark.slow  # one more run
def test_the_engines_log_probs_can_replace_a_forward_pass(folder):
    options = [
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=full",
        "worker.ref.fsdp.torch_dtype=fp32",
        "worker.ref.fsdp.mp_param_dtype=fp32",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.max_steps=2",
    ]
    metrics = train(folder / "bypass", *arguments(folder, *options))

    assert "timing_s/old" not in metrics[1]
    assert metrics[1]["actor/ppo_kl"] != 0  # two mini batches: the second one is off the engine's policy
    assert metrics[2]["actor/kl_loss"] > 0


@pytest.mark.slow  # one more run
def test_a_token_baseline_gets_its_sums_of_squares_from_the_actor(folder):
    options = ["algorithm.adv_estimator=optimal_token_baseline", "worker.actor.loss_type=kl_cov"]
    metrics = train(folder / "otb", *arguments(folder, *options, "trainer.max_steps=1"))

    assert metrics[1]["actor/kl_cov_frac"] > 0
    assert metrics[1]["critic/advantages/max"] > 0 > metrics[1]["critic/advantages/min"]


@pytest.mark.slow  # one more run
def test_a_step_that_cannot_be_filled_says_why(folder):
    options = [
        "algorithm.online_filtering=true",
        "algorithm.filter_low=0.98",
        "trainer.max_try_make_batch=2",
        "trainer.n_gpus_per_node=1",
        "trainer.max_steps=1",
    ]
    finished = start_training(
        *arguments(folder, *options), f"trainer.save_checkpoint_path={folder / 'unfilled'}"
    )

    assert finished.returncode == 1
    for part in ("trainer.max_try_make_batch", "were sampled and 0 kept", "algorithm.filter_low"):
        assert part in finished.stderr, finished.stderr[-3000:]
    assert "Traceback" not in finished.stderr
