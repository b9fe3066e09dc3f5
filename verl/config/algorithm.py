# SPDX-License-Identifier: Apache-2.0
"""Section `algorithm`: advantages, the KL term, and the selection and correction of rollouts.

It parses the thresholds and rejections of `rollout_correction` to find errors, and the trainer to apply them;
`verl/algorithms/rollout_correction.py` has the formulas.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from verl.config.files.paths import declared_needs, is_extension
from verl.config.schema import option

ADV_ESTIMATOR_NAMES = (
    *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "prime"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "sppo"),
    *("tir_optimal_token_baseline", "turn_gae", "turn_grpo"),
)
ADV_ESTIMATOR_ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}  # verl's
# Inputs that a run computes only for estimators that need them: by estimator here, and in the decorator
# `@needs(...)` of an estimator in a file.
ESTIMATOR_NEEDS = {
    "group": "at least two responses to each prompt, which it compares",
    "values": "the critic's values",
    "sum_squared_probs": "sums of squared probabilities, which are computed with the old log-probs",
    "reward_baselines": "the score of each prompt's greedy response",
    "reward_components": "the values of the reward function that `algorithm.gdpo_reward_keys` names",
    "process_rewards": "the rewards of PRIME's model, and `accuracies`",
}
NEEDS_OF: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "turn_grpo"),
        frozenset({"group"}),
    ),
    **dict.fromkeys(
        ("optimal_token_baseline", "tir_optimal_token_baseline"), frozenset({"group", "sum_squared_probs"})
    ),
    **dict.fromkeys(("gae", "turn_gae"), frozenset({"values"})),
    "gdpo": frozenset({"group", "reward_components"}),
    "prime": frozenset({"group", "process_rewards"}),
    "remax": frozenset({"reward_baselines"}),
}
# Estimators that compare nothing but the responses to one prompt.
WITHIN_GROUPS = (
    *("grpo", "grpo_passk", "opo", "optimal_token_baseline", "remax", "rloo"),
    *("tir_optimal_token_baseline", "turn_grpo"),
)
KL_NAMES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+", "full", "flow_grpo")
# Computed with both models: over the vocabulary, or of a sampler's Gaussians.
EXACT_KL = ("full", "flow_grpo")
# What `rollout_correction` rejects by.
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
MEASURES = ("k1", "k2", "k3")
REJECTIONS = tuple(
    f"{level}_{measure}" for level in LEVELS for measure in MEASURES if (level, measure) != ("seq_max", "k1")
)
QUOTE = "; quote it in YAML, which otherwise reads 0.5_5 as the number 0.55"


class Bounds(NamedTuple):
    """Bounds of importance weights."""

    lower: float | None  # None: clip at `upper`; otherwise weights outside the bounds become zero
    upper: float


class Rejection(NamedTuple):
    """A criterion to exclude tokens or whole sequences from the loss."""

    level: str  # in LEVELS
    measure: str  # in MEASURES
    lower: float | None  # minimum ratio of k1; k2 and k3 have no lower bound
    upper: float  # maximum ratio of k1, maximum value of k2 and k3

    @property
    def name(self) -> str:
        return f"{self.level}_{self.measure}"


def parse_bounds(text: str, option: str) -> Bounds:
    """Parse the threshold of importance weights: `2.0` clips them at 2, `0.5_5.0` drops weights outside."""
    numbers = _numbers(text)
    if len(numbers) == 1 and numbers[0] >= 1:
        return Bounds(None, numbers[0])
    if len(numbers) == 2 and 0 <= numbers[0] <= 1 <= numbers[1] and numbers[0] < numbers[1]:
        return Bounds(*numbers)
    raise ValueError(
        f"`{option}` must be a number of at least 1 or LOW_HIGH with 1 between, such as 2.0 or 0.5_5.0,"
        f" got {text!r}{QUOTE}"
    )


def parse_rejections(names: str | None, thresholds: str | None, path: str) -> tuple[Rejection, ...]:
    """Parse comma-separated criteria, `seq_mean_k1,seq_max_k3`, and their thresholds, `0.99_1.01,0.5`.

    A threshold of k1 is `LOW_HIGH`, or one number u for `1/u_u`; k2 and k3 take one number. Errors name the
    option in the section `path`.
    """
    option = f"{path}.rollout_rs"
    if names is None:
        if thresholds is not None:
            raise ValueError(f"`{option}_threshold` must be null without `{option}`, got {thresholds!r}")
        return ()
    parts = [part.strip() for part in names.split(",")]
    for part in parts:
        if part not in REJECTIONS:
            raise ValueError(f"`{option}` must hold names of {list(REJECTIONS)}, got {part!r}")
        if parts.count(part) > 1:
            raise ValueError(f"`{option}` must hold each name once, got {part!r} twice")
    texts = [] if thresholds is None else thresholds.split(",")
    if len(texts) != len(parts):
        raise ValueError(
            f"`{option}_threshold` must hold one threshold for each of {parts}, comma-separated,"
            f" got {thresholds!r}"
        )
    return tuple(_rejection(*pair, f"{option}_threshold") for pair in zip(parts, texts, strict=True))


def _rejection(name: str, text: str, option: str) -> Rejection:
    level, measure = name.rsplit("_", 1)
    numbers = _numbers(text)
    if measure == "k1":
        if len(numbers) == 1 and numbers[0] > 1:
            return Rejection(level, measure, 1 / numbers[0], numbers[0])
        if len(numbers) == 2 and 0 < numbers[0] <= 1 <= numbers[1] and numbers[0] < numbers[1]:
            return Rejection(level, measure, *numbers)
        raise ValueError(
            f"`{option}` of {name} must be LOW_HIGH with 1 between, or one number above 1, such as 0.5_2.0"
            f" or 2.0, got {text.strip()!r}{QUOTE}"
        )
    if len(numbers) == 1 and numbers[0] > 0:
        return Rejection(level, measure, None, numbers[0])
    raise ValueError(f"`{option}` of {name} must be one number above 0, got {text.strip()!r}")


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []


@dataclass(frozen=True)
class PFPPOConfig:
    """Resampling of sequences by score (PF-PPO)."""

    reweight_method: str = option(
        "pow",
        "Sequence weights: |score|^`weight_pow`, extreme scores only, or mainly the best scores.",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = option(2.0, "Exponent of the `pow` method.", minimum=0.0)


@dataclass(frozen=True)
class EarlyStopConfig:
    """Groups that a filter stops before all of their responses are sampled."""

    after: int | None = option(
        None,
        "Responses to a prompt after which the filter looks at their scores: a prompt that it would leave out"
        " is sampled on only with `keep_probability`; null samples all responses at once.",
        minimum=2,
    )
    keep_probability: float = option(
        0.5,
        "Probability of sampling on such a prompt, whose responses then weigh 1 / `keep_probability`.",
        minimum=0.01,
        maximum=1.0,
    )

    @property
    def is_used(self) -> bool:
        return self.after is not None


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction for the mismatch between the rollout policy and the trained policy."""

    rollout_is: str | None = option(
        None,
        "Weight the loss by the ratio of trainer to engine per token or sequence; null only logs it.",
        choices=("token", "sequence"),
    )
    rollout_is_threshold: str = option(
        "2.0", "Maximum weight; with `LOW_HIGH`, weights outside these bounds become zero (IcePop)."
    )
    rollout_is_batch_normalize: bool = option(False, "Normalize the weights by their mean over the batch.")
    rollout_rs: str | None = option(
        None, "Criteria to mask deviating tokens or sequences, comma-separated: `token_k1`, `seq_max_k3` ..."
    )
    rollout_rs_threshold: str | None = option(
        None, "Threshold per name in `rollout_rs`: ratios `LOW_HIGH` for k1, a maximum for k2 and k3."
    )
    bypass_mode: bool = option(False, "Use the engine's log-probs as `old_log_probs`, saving a forward pass.")
    loss_type: str = option(
        "ppo_clip",
        "Loss with `bypass_mode`: the loss of `worker.actor.loss_type`, or weighted REINFORCE.",
        choices=("ppo_clip", "reinforce"),
    )

    def problems(self, path: str) -> Iterator[str]:
        try:
            parse_bounds(self.rollout_is_threshold, f"{path}.rollout_is_threshold")
            parse_rejections(self.rollout_rs, self.rollout_rs_threshold, path)
        except ValueError as error:
            yield str(error)
        if self.loss_type == "reinforce" and not self.bypass_mode:
            yield (
                f"`{path}.loss_type` must be 'ppo_clip' without `{path}.bypass_mode=true`, got 'reinforce':"
                " otherwise `worker.actor.loss_type` selects the loss"
            )
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            yield (
                f"`{path}.rollout_is` must be null with `{path}.bypass_mode=true` and"
                f" `{path}.loss_type=ppo_clip`: the ratio in the loss already is trainer to engine"
            )
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            yield f"`{path}.rollout_is_batch_normalize` must be false without `{path}.rollout_is`"
        if self.bypass_mode and self.rollout_is_batch_normalize:
            yield (
                f"`{path}.rollout_is_batch_normalize` must be false with `{path}.bypass_mode=true`:"
                " the weights are only known per micro batch"
            )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, the KL term and the selection of rollouts."""

    gamma: float = option(1.0, "Token discount in `gae` and `reinforce_plus_plus`.", minimum=0.0, maximum=1.0)
    turn_gamma: float = option(
        1.0,
        "Discount of each turn of a conversation in `turn_grpo` and `turn_gae`.",
        minimum=0.0,
        maximum=1.0,
    )
    lam: float = option(
        1.0, "Lambda of `gae` and `turn_gae`: lower is less variance, more bias.", minimum=0.0, maximum=1.0
    )
    adv_estimator: str = option(
        "grpo",
        "Advantage estimator.",
        choices=(*ADV_ESTIMATOR_NAMES, *ADV_ESTIMATOR_ALIASES),
        resolve=lambda name: ADV_ESTIMATOR_ALIASES.get(name, name),
        extension="advantage estimator",
    )
    norm_adv_by_std: bool = option(
        True, "Divide advantages of `grpo`, `grpo_passk`, `turn_grpo` and `gdpo` by the group's deviation."
    )
    gdpo_reward_keys: list[str] = option(list, "Reward components for `gdpo`.")
    gdpo_reward_weights: list[float] | None = option(None, "Weights of `gdpo_reward_keys`; null is all 1.")
    sppo_beta: float = option(1.0, "Sharpness of the mean in the `sppo` estimator.", minimum=1e-6)
    prime_accuracy_key: str = option("accuracy", "Reward component for correctness, used by `prime`.")
    prime_process_coef: float = option(5.0, "Weight of the process rewards in `prime`.", minimum=0.0)
    prime_accuracy_coef: float = option(5.0, "Weight of the accuracy in `prime`.", minimum=0.0)
    prime_norm: bool = option(True, "Divide process rewards in `prime` by the largest return of the batch.")
    disable_kl: bool = option(False, "Train without a reference policy and KL term.")
    use_kl_loss: bool = option(False, "Apply the KL term in the loss, not in the rewards.", example=True)
    kl_penalty: str = option(
        "kl", "KL estimator.", choices=KL_NAMES, example="low_var_kl", extension="KL estimator"
    )
    kl_coef: float = option(1e-3, "Coefficient of the KL term; 0 only logs it.", minimum=0.0, example=1e-2)
    kl_type: str = option(
        "fixed", "`kl_coef` in rewards: fixed, or adapted to `kl_target`.", choices=("fixed", "adaptive")
    )
    kl_horizon: float = option(1e4, "Time scale of the adaptive coefficient in sequences.", minimum=1.0)
    kl_target: float = option(0.1, "Target KL of the adaptive coefficient in nats.", minimum=1e-6)
    online_filtering: bool = option(
        False, "Sample until enough prompts have a mean score between `filter_low` and `filter_high` (DAPO)."
    )
    filter_key: str = option("overall", "Score for online filtering and rejection sampling.")
    filter_low: float = option(0.01, "Lower bound of the mean score in online filtering, exclusive.")
    filter_high: float = option(0.99, "Upper bound of the mean score in online filtering, exclusive.")
    early_stop: EarlyStopConfig = option(
        EarlyStopConfig, "Stop of prompts that a filter is likely to leave out."
    )
    replay_max_age: int | None = option(
        None,
        "Steps since they were sampled, up to which trained groups fill a step for which a filter keeps too"
        " few; null samples more prompts instead.",
        minimum=1,
    )
    use_pf_ppo: bool = option(False, "Resample the sequences of a step by score (PF-PPO).")
    pf_ppo: PFPPOConfig = option(PFPPOConfig, "Weights of PF-PPO.")
    rollout_correction: RolloutCorrectionConfig = option(
        RolloutCorrectionConfig, "Correction for the mismatch between rollout engine and trainer."
    )

    @property
    def use_reference(self) -> bool:
        return not self.disable_kl

    @property
    def needs(self) -> frozenset[str]:
        """Names in `ESTIMATOR_NEEDS`: the inputs that the estimator needs."""
        if is_extension(self.adv_estimator):
            return declared_needs(self.adv_estimator)
        return NEEDS_OF.get(self.adv_estimator, frozenset())

    @property
    def use_critic(self) -> bool:
        return "values" in self.needs

    @property
    def use_prime(self) -> bool:
        return "process_rewards" in self.needs

    def problems(self, path: str) -> Iterator[str]:
        yield from self._unknown_needs(path)
        if self.filter_low >= self.filter_high:
            low, high = self.filter_low, self.filter_high
            yield f"`{path}.filter_low` ({low}) must be below `{path}.filter_high` ({high})"
        if self.kl_type == "adaptive" and self.use_kl_loss and not self.disable_kl:
            yield (
                f"`{path}.kl_type` must be 'fixed' with `{path}.use_kl_loss=true`, got 'adaptive':"
                " the adaptive coefficient applies to the KL in the rewards"
            )
        if "reward_components" in self.needs and not self.gdpo_reward_keys:
            yield (
                f"`{path}.gdpo_reward_keys` must name reward components with"
                f" `{path}.adv_estimator={self.adv_estimator}`, for example [accuracy, format]"
            )
        weights, keys = self.gdpo_reward_weights, self.gdpo_reward_keys
        if weights is not None and len(weights) != len(keys):
            yield (
                f"`{path}.gdpo_reward_weights` must hold one number for each of"
                f" `{path}.gdpo_reward_keys`: {len(weights)} for {len(keys)} keys"
            )
        penalized = not self.disable_kl and not self.use_kl_loss and self.kl_coef > 0
        if self.adv_estimator in ("gdpo", "prime") and penalized:
            yield (
                f"`{path}.use_kl_loss` must be true with `{path}.adv_estimator={self.adv_estimator}`, which"
                f" does not read the rewards that a KL penalty changes; or set `{path}.disable_kl=true`"
            )

    def _unknown_needs(self, path: str) -> Iterator[str]:
        key = f"`{path}.adv_estimator` ({self.adv_estimator})"
        unknown = sorted(self.needs - ESTIMATOR_NEEDS.keys())
        if unknown:
            yield f"{key} must declare needs among {list(ESTIMATOR_NEEDS)}, got {unknown}"
        if {"reward_components", "process_rewards"} <= self.needs:
            yield f"{key} must not need both `reward_components` and `process_rewards`"
