# SPDX-License-Identifier: Apache-2.0
"""Which algorithms go together with which sampling, models and losses.

To add a rule: one generator here, listed in `RULES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from verl.config.algorithm import TOKEN_BASELINES
from verl.config.model import ModelConfig

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig

COMPARING = {  # estimators that compare the responses to one prompt
    *("grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"),
    *(*TOKEN_BASELINES, "prime"),
}


def algorithm_problems(config: PPOConfig) -> Iterator[str]:
    """Yield every combination that cannot mean anything."""
    for rule in RULES:
        yield from rule(config)


def group_sizes(config: PPOConfig) -> Iterator[str]:
    """Estimators that compare responses need several; remax's samples must differ from its baseline."""
    estimator, num_responses = config.algorithm.adv_estimator, config.worker.rollout.n
    if estimator in COMPARING and num_responses < 2:
        yield (
            f"`worker.rollout.n` must be at least 2 with `algorithm.adv_estimator={estimator}`,"
            f" got {num_responses}: it compares the responses to one prompt"
        )
    if estimator == "remax" and config.worker.rollout.top_k == 1:
        yield (
            "`worker.rollout.top_k` must not be 1 with `algorithm.adv_estimator=remax`: every response would"
            " equal the greedy one it is compared with"
        )
    if config.filters_prompts and num_responses < 2:
        option = (
            "algorithm.online_filtering" if config.algorithm.online_filtering else "trainer.rejection_sample"
        )
        yield f"`worker.rollout.n` must be at least 2 with `{option}=true`, got {num_responses}"


def filters(config: PPOConfig) -> Iterator[str]:
    """Two ways to choose prompts exclude each other, and both need the reward function's scores."""
    algorithm, trainer = config.algorithm, config.trainer
    if algorithm.online_filtering and trainer.rejection_sample:
        yield "`algorithm.online_filtering` and `trainer.rejection_sample` must not both be true: choose one"
    if trainer.rejection_sample_multiplier > 1 and not trainer.rejection_sample:
        yield "`trainer.rejection_sample_multiplier` above 1 needs `trainer.rejection_sample=true`"
    if config.filters_prompts and config.worker.reward.reward_function is None:
        yield (
            "`worker.reward.reward_function` must be set to filter prompts: only its scores are known while"
            " sampling"
        )


def critic(config: PPOConfig) -> Iterator[str]:
    """`gae` needs a value model, and only `gae` does."""
    if config.use_critic and config.worker.critic.model.model_path is None:
        yield (
            "`worker.critic.model.model_path` must be set with `algorithm.adv_estimator=gae`, usually to the"
            " actor's model; or choose an estimator without a critic, such as grpo"
        )
    if config.trainer.critic_warmup and not config.use_critic:
        yield (
            f"`trainer.critic_warmup` ({config.trainer.critic_warmup}) must be 0 with"
            f" `algorithm.adv_estimator={config.algorithm.adv_estimator}`, which has no critic"
        )


def prime(config: PPOConfig) -> Iterator[str]:
    """Without files of its own the process reward model is the actor's, with all that is said of that."""
    model, default = config.worker.prime.model, ModelConfig()
    if not config.use_prime or model.model_path is not None:
        return
    for entry in fields(model):
        if getattr(model, entry.name) != getattr(default, entry.name):
            yield (
                f"`worker.prime.model.{entry.name}` has no effect without `worker.prime.model.model_path`:"
                " set that, or leave it out to take the actor's model with its options"
            )


def bypass(config: PPOConfig) -> Iterator[str]:
    """What needs the trainer's own log-probs of the sampled tokens does not go with skipping them."""
    algorithm = config.algorithm
    if not algorithm.rollout_correction.bypass_mode:
        return
    if algorithm.adv_estimator in TOKEN_BASELINES:
        yield (
            "`algorithm.rollout_correction.bypass_mode` must be false with"
            f" `algorithm.adv_estimator={algorithm.adv_estimator}`, which needs the pass that it skips"
        )
    in_rewards = config.use_reference and not algorithm.use_kl_loss
    if in_rewards and algorithm.kl_penalty == "full":
        yield (
            "`algorithm.rollout_correction.bypass_mode` must be false with `algorithm.kl_penalty=full` in the"
            " rewards, which needs the pass that it skips"
        )


def rewards(config: PPOConfig) -> Iterator[str]:
    """What is added to the overall score is lost where an estimator reads components instead."""
    reward, estimator = config.worker.reward, config.algorithm.adv_estimator
    if reward.overlong_buffer_length > config.data.max_response_length:
        yield (
            f"`worker.reward.overlong_buffer_length` ({reward.overlong_buffer_length}) must be at most"
            f" `data.max_response_length` ({config.data.max_response_length})"
        )
    if estimator == "remax" and config.worker.reward_model.is_used:
        yield (
            "`worker.reward_model.model.model_path` must be null with `algorithm.adv_estimator=remax`: the"
            " greedy baseline is scored by the reward function alone"
        )
    if estimator not in ("gdpo", "prime"):
        return
    if reward.reward_function is None:
        yield f"`worker.reward.reward_function` must be set with `algorithm.adv_estimator={estimator}`"
    if reward.overlong_buffer_length:
        yield (
            f"`worker.reward.overlong_buffer_length` must be 0 with `algorithm.adv_estimator={estimator}`,"
            " which reads components of the reward and not its sum"
        )
    if config.worker.reward_model.is_used:
        yield (
            f"`worker.reward_model.model.model_path` must be null with `algorithm.adv_estimator={estimator}`,"
            " which reads components of the reward function only"
        )


RULES = (group_sizes, filters, critic, prime, bypass, rewards)
