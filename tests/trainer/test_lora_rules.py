# SPDX-License-Identifier: Apache-2.0
"""Runs with adapters are checked and planned before anything starts."""

import pytest

from tests.helpers.training import QUICKSTART
from tests.planning.test_memory_plan import make_config, phases_of
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.models.tiny import save_tiny_model
from verl.planning.planned_run import planned_ppo
from verl.trainer.model_checks import check_models

PRIME = {"algorithm.adv_estimator": "prime", "worker.prime.model.model_path": "model"}


@pytest.fixture(scope="module")
def prime(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    save_tiny_model(folder / "model", "qwen2")
    rows = folder / "rows.jsonl"
    rows.write_text('{"problem": "What?", "answer": "This."}\n')
    return [
        f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"worker.prime.model.model_path={folder / 'model'}",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        "worker.prime.global_batch_size=4",
        "algorithm.adv_estimator=prime",
    ]


def test_an_adapted_process_reward_model_needs_no_second_copy_for_its_reference():
    whole, adapted = make_config(PRIME), make_config(PRIME | {"worker.prime.model.lora.rank": 8})

    assert phases_of(whole).keys() - phases_of(adapted).keys() == {"prime_ref"}
    assert phases_of(adapted).keys() >= {"process_rewards", "update_prime"}


def test_options_of_a_process_reward_model_that_is_the_actors_are_refused(prime):
    changes = ["worker.prime.model.model_path=null", "worker.prime.model.lora.rank=8"]

    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, [*prime, *changes])

    (problem,) = raised.value.problems
    assert "`worker.prime.model.lora` has no effect without `worker.prime.model.model_path`" in problem


def test_a_pattern_of_the_process_reward_model_that_matches_nothing_is_found_before_a_device_is_taken(prime):
    lora = "worker.prime.model.lora"
    config = load_config(PPOConfig, [*prime, f"{lora}.rank=8", f"{lora}.target_modules=qproj"])

    with pytest.raises(ValueError, match=rf"`{lora}.target_modules` \(qproj\) matches no linear module"):
        check_models(planned_ppo(config))
