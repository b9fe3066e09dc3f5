# SPDX-License-Identifier: Apache-2.0
"""Options of the algorithm: how rewards become advantages, the KL term, and which rollouts are trained on."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.rollout_correction import parse_bounds, parse_rejections
from verl.config.schema import option

ADV_ESTIMATOR_NAMES = (
    *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "prime"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "sppo"),
    "tir_optimal_token_baseline",
)
TOKEN_BASELINES = (  # read sums of squared probabilities, which come with the old log-probs
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
KL_NAMES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+", "full")


@dataclass(frozen=True)
class PFPPOConfig:
    """Resampling of a step's sequences by their scores (PF-PPO)."""

    reweight_method: str = option(
        "pow",
        help="Weight of a sequence: |score|^`weight_pow`, only the extreme scores, or mostly the best.",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = option(2.0, help="Exponent of the `pow` method.", minimum=0.0)


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction for the difference between the policy that samples and the one that is trained."""

    rollout_is: str | None = option(
        None,
        help="Weigh the loss by the ratio of trainer to engine, by token or sequence; null only measures it.",
        choices=("token", "sequence"),
    )
    rollout_is_threshold: str = option(
        "2.0", help="Weights are cut at this; `LOW_HIGH` sets those outside to zero instead (IcePop)."
    )
    rollout_is_batch_normalize: bool = option(False, help="Divide the weights by their mean over the batch.")
    rollout_rs: str | None = option(
        None,
        help="Mask what differs too much: `token_k1`, `seq_mean_k1`, `seq_max_k3` ..., with commas between.",
    )
    rollout_rs_threshold: str | None = option(
        None,
        help="Bounds for each name in `rollout_rs`: `LOW_HIGH` ratios for k1, a largest value for k2, k3.",
    )
    bypass_mode: bool = option(
        False, help="Trust the engine's log-probs as `old_log_probs` and skip their recomputation."
    )
    loss_type: str = option(
        "ppo_clip",
        help="With `bypass_mode`: the policy loss of `worker.actor.loss_type`, or REINFORCE with weights.",
        choices=("ppo_clip", "reinforce"),
    )

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the thresholds, and between the options."""
        try:
            parse_bounds(self.rollout_is_threshold, f"{path}.rollout_is_threshold")
            parse_rejections(self.rollout_rs, self.rollout_rs_threshold, path)
        except ValueError as error:
            yield str(error)
        if self.loss_type == "reinforce" and not self.bypass_mode:
            yield (
                f"`{path}.loss_type` must be 'ppo_clip' without `{path}.bypass_mode=true`, got 'reinforce':"
                " the loss of `worker.actor.loss_type` is used"
            )
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            yield (
                f"`{path}.rollout_is` must be null with `{path}.bypass_mode=true` and"
                f" `{path}.loss_type=ppo_clip`: the ratio of the loss is that of trainer to engine already"
            )
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            yield f"`{path}.rollout_is_batch_normalize` must be false without `{path}.rollout_is`"
        if self.bypass_mode and self.rollout_is_batch_normalize:
            yield (
                f"`{path}.rollout_is_batch_normalize` must be false with `{path}.bypass_mode=true`:"
                " the weights are then known micro batch by micro batch only"
            )


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become advantages, and how far the policy may move from the reference."""

    gamma: float = option(
        1.0,
        help="Discount of rewards, for each token, in `gae` and `reinforce_plus_plus`.",
        minimum=0.0,
        maximum=1.0,
    )
    lam: float = option(
        1.0, help="Weight of longer returns in the `gae` estimator.", minimum=0.0, maximum=1.0
    )
    adv_estimator: str = option("grpo", help="Advantage estimator.", choices=ADV_ESTIMATOR_NAMES)
    norm_adv_by_std: bool = option(
        True,
        help="Divide advantages of `grpo`, `grpo_passk` and `gdpo` by the deviation of the group's scores.",
    )
    gdpo_reward_keys: list[str] = option(list, help="Values of the reward function that `gdpo` compares.")
    gdpo_reward_weights: list[float] | None = option(
        None, help="Weight of each of `gdpo_reward_keys`; null is 1 for all."
    )
    sppo_beta: float = option(1.0, help="Sharpness of the `sppo` estimator's mean.", minimum=1e-6)
    prime_accuracy_key: str = option(
        "accuracy", help="Value of the reward function that says whether a response is right, for `prime`."
    )
    prime_process_coef: float = option(5.0, help="Weight of process rewards in `prime`.", minimum=0.0)
    prime_accuracy_coef: float = option(5.0, help="Weight of the accuracy in `prime`.", minimum=0.0)
    prime_norm: bool = option(
        True, help="Divide process rewards by the largest return of the batch in `prime`."
    )
    disable_kl: bool = option(False, help="Load no reference policy and use no KL term.")
    use_kl_loss: bool = option(
        False, help="Put the KL term into the loss; false subtracts it from the rewards.", example=True
    )
    kl_penalty: str = option("kl", help="KL estimator.", choices=KL_NAMES, example="low_var_kl")
    kl_coef: float = option(
        1e-3, help="Weight of the KL term; 0 logs the KL without using it.", minimum=0.0, example=1e-2
    )
    kl_type: str = option(
        "fixed",
        help="Weight of the KL in the rewards: fixed, or steered to `kl_target`.",
        choices=("fixed", "adaptive"),
    )
    kl_horizon: float = option(1e4, help="Sequences over which the adaptive weight moves.", minimum=1.0)
    kl_target: float = option(0.1, help="KL in nats that the adaptive weight steers to.", minimum=1e-6)
    online_filtering: bool = option(
        False, help="Sample until a step has enough prompts whose mean score is informative (DAPO)."
    )
    filter_key: str = option("overall", help="Score that filtering and rejection read.")
    filter_low: float = option(0.01, help="Online filtering keeps groups with a mean score above this.")
    filter_high: float = option(0.99, help="Online filtering keeps groups with a mean score below this.")
    use_pf_ppo: bool = option(False, help="Draw a step's sequences again, by their scores (PF-PPO).")
    pf_ppo: PFPPOConfig = option(PFPPOConfig, help="How PF-PPO weighs sequences.")
    rollout_correction: RolloutCorrectionConfig = option(
        RolloutCorrectionConfig, help="Correction for the difference between engine and trainer."
    )

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong between the options of this section."""
        if self.filter_low >= self.filter_high:
            low, high = self.filter_low, self.filter_high
            yield f"`{path}.filter_low` ({low}) must be below `{path}.filter_high` ({high})"
        if self.kl_type == "adaptive" and self.use_kl_loss and not self.disable_kl:
            yield (
                f"`{path}.kl_type` must be 'fixed' with `{path}.use_kl_loss=true`, got 'adaptive':"
                " the adaptive weight applies to KL in the rewards"
            )
        if self.adv_estimator == "gdpo" and not self.gdpo_reward_keys:
            yield (
                f"`{path}.gdpo_reward_keys` must name values of the reward function with"
                f" `{path}.adv_estimator=gdpo`, for example [accuracy, format]"
            )
        weights, keys = self.gdpo_reward_weights, self.gdpo_reward_keys
        if weights is not None and len(weights) != len(keys):
            yield (
                f"`{path}.gdpo_reward_weights` must hold one number for each of"
                f" `{path}.gdpo_reward_keys`: {len(weights)} for {len(keys)} keys"
            )
        penalised = not self.disable_kl and not self.use_kl_loss and self.kl_coef > 0
        if self.adv_estimator in ("gdpo", "prime") and penalised:
            yield (
                f"`{path}.use_kl_loss` must be true with `{path}.adv_estimator={self.adv_estimator}`, which"
                f" does not read the rewards that a KL penalty changes; or set `{path}.disable_kl=true`"
            )
