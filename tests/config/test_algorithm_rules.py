# SPDX-License-Identifier: Apache-2.0
"""Rules between the algorithm and other sections, and the choices of options with a registry."""

import pytest

from tests.helpers.extensions import minimal_arguments
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.aggregation import AGGREGATIONS
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.algorithms.resampling import RESAMPLING_METHODS
from verl.config.algorithm import ADV_ESTIMATOR_ALIASES
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config, walk_options
from verl.config.worker import LOSS_AVG_ALIASES


@pytest.fixture(scope="module")
def minimal(tmp_path_factory):
    return [*minimal_arguments(tmp_path_factory.mktemp("reward")), "data.max_response_length=64"]


@pytest.mark.parametrize(
    ("registry", "aliases"),
    [
        (ADV_ESTIMATORS, ADV_ESTIMATOR_ALIASES),
        (POLICY_LOSSES, ()),
        (KL_ESTIMATORS, ()),
        (RESAMPLING_METHODS, ()),
        (AGGREGATIONS, LOSS_AVG_ALIASES),
    ],
    ids=lambda value: getattr(value, "option", ""),
)
def test_an_option_names_exactly_the_registered_functions(registry, aliases):
    (entry,) = [entry for entry in walk_options(PPOConfig) if entry.key == registry.option]

    assert sorted(set(entry.info.choices) - set(aliases)) == registry.names()


def test_an_unknown_name_lists_the_known_ones(minimal):
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, [*minimal, "algorithm.adv_estimator=gpro"])

    (problem,) = raised.value.problems
    assert all(name in problem for name in ADV_ESTIMATORS.names())


@pytest.mark.parametrize(("verls", "ours"), LOSS_AVG_ALIASES.items())
def test_verls_names_of_aggregations_are_accepted(minimal, verls, ours):
    config = load_config(PPOConfig, [*minimal, f"worker.actor.loss_avg_mode={verls}"])

    assert config.worker.actor.loss_avg_mode == ours


@pytest.mark.parametrize(("verls", "ours"), [("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo")])
def test_verls_names_of_estimators_are_accepted(minimal, verls, ours):
    config = load_config(PPOConfig, [*minimal, f"algorithm.adv_estimator={verls}"])

    assert config.algorithm.adv_estimator == ours


CORRECTION = "algorithm.rollout_correction"
EARLY, FILTER = "algorithm.early_stop.after", "algorithm.online_filtering=true"
REPLAY = "algorithm.replay_max_age"
ADAPTIVE = "worker.actor.adaptive_entropy"
TURNS = "worker.rollout.multi_turn"
LONE = [
    "gae",
    "reinforce_plus_plus",
    "remax",
    "sppo",
    "turn_gae",
]  # estimators for which one response is enough


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["algorithm.adv_estimator=gae"], ["worker.critic.model.model_path", "must be set"]),
        (["trainer.critic_warmup=5"], ["trainer.critic_warmup", "(5)", "no critic"]),
        (
            ["algorithm.adv_estimator=remax", "worker.rollout.top_k=1"],
            ["worker.rollout.top_k", "remax", "greedy"],
        ),
        (["algorithm.adv_estimator=gdpo", "algorithm.disable_kl=true"], ["gdpo_reward_keys", "for example"]),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]"],
            ["algorithm.use_kl_loss", "must be true", "gdpo"],
        ),
        (
            [
                *("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]"),
                *("algorithm.disable_kl=true", "algorithm.gdpo_reward_weights=[1.0]"),
            ],
            ["algorithm.gdpo_reward_weights", "1 for 2 keys"],
        ),
        (
            [
                *("algorithm.adv_estimator=prime", "algorithm.disable_kl=true"),
                "worker.reward.overlong_buffer_length=8",
            ],
            ["worker.reward.overlong_buffer_length", "must be 0", "prime"],
        ),
        (["worker.reward.overlong_buffer_length=99"], ["overlong_buffer_length", "(99)", "(64)"]),
        (["worker.actor.loss_type=dro"], ["worker.actor.dro_beta", "must be set"]),
        (
            ["algorithm.online_filtering=true", "trainer.rejection_sample=true"],
            ["algorithm.online_filtering", "trainer.rejection_sample", "choose one"],
        ),
        (["trainer.rejection_sample_multiplier=2"], ["needs `trainer.rejection_sample=true`"]),
        (["algorithm.filter_low=0.9", "algorithm.filter_high=0.1"], ["filter_low", "must be below"]),
        ([f"{EARLY}=2"], [EARLY, "(2) needs a filter", "algorithm.online_filtering=true"]),
        ([f"{REPLAY}=2", f"{CORRECTION}.rollout_is=token"], [REPLAY, "(2) needs a filter"]),
        ([FILTER, f"{REPLAY}=2"], [REPLAY, "(2) needs", f"{CORRECTION}.rollout_is=token", "older weights"]),
        (
            [FILTER, f"{REPLAY}=2", f"{CORRECTION}.rollout_is=token", "trainer.async_training.mode=partial"],
            [REPLAY, "must be null", "mode=partial", "one_step_off"],
        ),
        ([FILTER, f"{EARLY}=5"], [EARLY, "(5) must be below", "worker.rollout.n", "(5)"]),
        ([FILTER, f"{EARLY}=2", "algorithm.adv_estimator=sppo"], [EARLY, "must be null", "sppo", "grpo"]),
        ([FILTER, f"{EARLY}=2", "algorithm.use_pf_ppo=true"], [EARLY, "must be null", "use_pf_ppo"]),
        (
            [FILTER, f"{EARLY}=2", "trainer.async_training.mode=partial"],
            [EARLY, "must be null", "mode=partial", "one_step_off"],
        ),
        (
            [f"{ADAPTIVE}.enabled=true", "worker.actor.entropy_coef=0.1"],
            ["worker.actor.entropy_coef", "(0.1)", "max_entropy_coef", "(0.005)"],
        ),
        (
            [
                f"{ADAPTIVE}.enabled=true",
                f"{ADAPTIVE}.min_entropy_coef=0.002",
                "worker.actor.entropy_coef=0.001",
            ],
            ["worker.actor.entropy_coef", "(0.001)", "min_entropy_coef", "(0.002)"],
        ),
        (["worker.actor.clip_cov_lb=6.0"], ["clip_cov_lb", "must be below", "clip_cov_ub"]),
        ([f"{CORRECTION}.rollout_is_threshold=0.5"], [f"{CORRECTION}.rollout_is_threshold", "'0.5'"]),
        ([f"{CORRECTION}.rollout_rs=seq_k9"], [f"{CORRECTION}.rollout_rs", "seq_k9", "seq_mean_k1"]),
        ([f"{CORRECTION}.rollout_rs=seq_mean_k1"], [f"{CORRECTION}.rollout_rs_threshold"]),
        (
            [f"{CORRECTION}.loss_type=reinforce"],
            [f"{CORRECTION}.loss_type", f"{CORRECTION}.bypass_mode=true"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            [f"{CORRECTION}.rollout_is", "must be null", "already"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", "algorithm.adv_estimator=optimal_token_baseline"],
            [f"{CORRECTION}.bypass_mode", "must be false", "optimal_token_baseline"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", "algorithm.kl_penalty=full"],
            [f"{CORRECTION}.bypass_mode", "algorithm.kl_penalty=full"],
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", "worker.actor.router_replay=r2"],
            [f"{CORRECTION}.bypass_mode", "must be false", "worker.actor.router_replay=r2", "use r3"],
        ),
        (
            [f"{CORRECTION}.rollout_is_batch_normalize=true"],
            ["must be false without", f"{CORRECTION}.rollout_is"],
        ),
    ],
    ids=lambda value: value[0].split(".")[-1] if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_combination_that_makes_no_sense_is_an_error_that_names_both_sides(minimal, arguments, parts):
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, [*minimal, *arguments])

    (problem,) = raised.value.problems
    for part in parts:
        assert part in problem


@pytest.mark.parametrize("estimator", sorted(set(ADV_ESTIMATORS.names()) - set(LONE)))
def test_estimators_that_compare_responses_need_several(minimal, estimator):
    needed = ["algorithm.disable_kl=true", "algorithm.gdpo_reward_keys=[accuracy]"]
    with pytest.raises(ConfigError) as raised:
        load_config(
            PPOConfig, [*minimal, *needed, f"algorithm.adv_estimator={estimator}", "worker.rollout.n=1"]
        )

    (problem,) = raised.value.problems
    assert f"`worker.rollout.n` must be at least 2 with `algorithm.adv_estimator={estimator}`" in problem


@pytest.mark.parametrize("estimator", LONE)
def test_other_estimators_accept_one_response(minimal, estimator):
    critic = "worker.critic.model.model_path=owner/model"
    load_config(PPOConfig, [*minimal, critic, f"algorithm.adv_estimator={estimator}", "worker.rollout.n=1"])


def test_the_models_of_a_run_follow_from_its_algorithm(minimal):
    ppo = ["algorithm.adv_estimator=gae", "worker.critic.model.model_path=owner/model"]

    assert load_config(PPOConfig, minimal).models == ["actor", "ref"]
    assert load_config(PPOConfig, [*minimal, *ppo]).models == ["actor", "critic", "ref"]


def test_a_reward_model_can_replace_the_reward_function(minimal):
    without = [argument for argument in minimal if "reward_function" not in argument]

    with pytest.raises(ConfigError, match=r"worker.reward.reward_function.*worker.reward_model"):
        load_config(PPOConfig, without)
    load_config(PPOConfig, [*without, "worker.reward_model.model.model_path=owner/scorer"])


@pytest.mark.parametrize("world", ["environment=gymnasium", "agent=verifiers"])
def test_an_environment_or_an_agent_can_replace_the_reward_function(minimal, world):
    without = [argument for argument in minimal if "reward_function" not in argument]
    turns = [f"{TURNS}.enable=true", f"{TURNS}.{world}"]
    filtered = "algorithm.online_filtering=true"  # by the rewards of turns

    load_config(PPOConfig, [*without, *turns, filtered])
    with pytest.raises(ConfigError, match=r"reward_function` must be set.* or an environment or an agent"):
        load_config(PPOConfig, [*without, f"{TURNS}.enable=true", f"{TURNS}.tools=[calculator]"])
    with pytest.raises(ConfigError, match=r"must be set with .*adv_estimator=gdpo"):
        load_config(
            PPOConfig, [*without, *turns, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]"]
        )


def test_a_call_of_the_engine_may_exceed_the_rollout_batch_with_a_filter(minimal):
    more = "data.mini_rollout_batch_size=24"

    with pytest.raises(ConfigError, match=r"`data.rollout_batch_size` \(8\) must be divisible"):
        load_config(PPOConfig, [*minimal, more])
    load_config(PPOConfig, [*minimal, more, "algorithm.online_filtering=true"])
