# SPDX-License-Identifier: Apache-2.0
"""Section `worker`: actor, critic, reference, reward models, rollout engine, reward function."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.config.files.paths import function_in_file, is_extension
from verl.config.model import (
    TINY,
    FSDPConfig,
    MicroBatchSize,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    TrainedModelConfig,
    micro_batch_option,
)
from verl.config.rollout import RolloutConfig
from verl.config.schema import option

# The reward function of `worker.rollout.open_ended_reward`.
OPEN_ENDED = f"{Path(__file__).parents[1] / 'rewards' / 'graders' / 'open_ended.py'}:compute_score"

LOSS_AVG_MODES = ("token", "seq", "seq_sum", "seq_sum_norm")
LOSS_AVG_ALIASES = {  # verl's names
    "token-mean": "token",
    "seq-mean-token-mean": "seq",
    "seq-mean-token-sum": "seq_sum",
    "seq-mean-token-sum-norm": "seq_sum_norm",
}
WHOLE_ROW_LOSSES = ("gspo", "gspo_token", "geo_mean", "sppo")


def _strategy_option() -> Any:
    return option("fsdp", "Backend that shards the model: FSDP2, by either name.", choices=("fsdp", "fsdp2"))


def _loss_avg_option(help: str) -> Any:
    choices = (*LOSS_AVG_MODES, *LOSS_AVG_ALIASES)
    return option("token", help, choices=choices, resolve=lambda name: LOSS_AVG_ALIASES.get(name, name))


@dataclass(frozen=True)
class AdaptiveEntropyConfig:
    """Adaptive coefficient of the entropy bonus (Skywork-OR1)."""

    enabled: bool = option(False, "Adapt the coefficient of the entropy bonus to reach a target entropy.")
    target_entropy: float = option(0.2, "Apply the bonus below this entropy in nats per token.", minimum=0.0)
    delta_entropy_coef: float = option(1e-4, "Change of the coefficient per step.", minimum=0.0)
    max_entropy_coef: float = option(5e-3, "Maximum coefficient.", minimum=0.0)
    min_entropy_coef: float = option(0.0, "Minimum coefficient.", minimum=0.0)

    def problems(self, path: str) -> Iterator[str]:
        if self.min_entropy_coef > self.max_entropy_coef:
            low, high = self.min_entropy_coef, self.max_entropy_coef
            yield f"`{path}.min_entropy_coef` ({low}) must be at most `{path}.max_entropy_coef` ({high})"


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    """Policy and its update."""

    strategy: str = _strategy_option()
    clip_ratio_low: float = option(0.2, "Clip the ratio below 1 minus this.", minimum=0.0, maximum=1.0)
    clip_ratio_high: float = option(0.3, "Clip the ratio above 1 plus this.", minimum=0.0)
    clip_ratio_dual: float = option(3.0, "Maximum ratio for negative advantages (dual clip).", minimum=1.0)
    loss_avg_mode: str = _loss_avg_option(
        "Mean over tokens (`token`), or mean over sequences of their means (`seq`), sums (`seq_sum`) or"
        " sums / `data.max_response_length` (`seq_sum_norm`)."
    )
    loss_type: str = option(
        "default",
        "Policy loss.",
        choices=(
            *("default", "gspo", "gspo_token", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov"),
            *("gpg", "dppo_tv", "dppo_kl", "dro", "sppo"),
        ),
        extension="policy loss",
    )
    loss_terms: tuple[str, ...] = option(
        (),
        "Terms added to the policy's loss: each a LossTerm of a file, `file.py:NAME`.",
        extension="loss term",
    )
    observers: tuple[str, ...] = option(
        (),
        "Observers of the policy's forward passes: each a ForwardObserver of a file, `file.py:NAME`.",
        extension="forward observer",
    )
    clip_cov_ratio: float = option(
        2e-4, "Fraction of the mini batch's tokens that `clip_cov` excludes.", minimum=0.0, maximum=1.0
    )
    clip_cov_lb: float = option(1.0, "Lower bound of the covariance of tokens excluded by `clip_cov`.")
    clip_cov_ub: float = option(5.0, "Upper bound of the covariance of tokens excluded by `clip_cov`.")
    kl_cov_ratio: float = option(
        2e-4, "Fraction of the mini batch's tokens that `kl_cov` penalizes.", minimum=0.0, maximum=1.0
    )
    ppo_kl_coef: float = option(0.1, "Coefficient of the KL penalty in `kl_cov`.", minimum=0.0)
    dro_beta: float | None = option(
        None, "Coefficient of the squared log-ratio in the `dro` loss, which requires it.", minimum=TINY
    )
    sppo_eta: float = option(1.0, "Scale of the advantage that `sppo` fits the log-ratio to.", minimum=TINY)
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus.", minimum=0.0)
    adaptive_entropy: AdaptiveEntropyConfig = option(
        AdaptiveEntropyConfig, "Adaptive coefficient of the entropy bonus, which starts at `entropy_coef`."
    )
    ppo_epochs: int = option(1, "Epochs over a rollout batch.", minimum=1)
    padding_free: bool = option(True, "Remove padding before the model.")
    share_prompt: bool = option(True, "Compute each prompt once for all its responses, if supported.")
    router_replay: str = option(
        "off",
        "Experts of a mixture in the update: those of the old-log-probs pass (`r2`) or, there as well, of the"
        " engine (`r3`).",
        choices=("off", "r2", "r3"),
    )
    use_torch_compile: bool = option(True, "Compile the log-prob function.")
    tau_positive: float = option(1.0, "Temperature for advantages >= 0 in the `sapo` loss.", minimum=TINY)
    tau_negative: float = option(1.05, "Temperature for advantages < 0 in the `sapo` loss.", minimum=TINY)
    kl_penalty: str | None = option(None, "KL estimator.")
    vila_model: bool = option(False, "The model belongs to the VILA family.")
    diffusion: bool = option(False, "The model generates images or videos.")
    guidance_scale: float = option(4.5, "Classifier-free guidance scale of diffusion.")
    scheduler: str = option("", "Noise schedule of diffusion.")

    @property
    def selects_tokens(self) -> bool:
        """True if the loss chooses among all tokens of a mini batch; one of a file may."""
        return self.loss_type in ("clip_cov", "kl_cov") or is_extension(self.loss_type)

    @property
    def reads_whole_rows(self) -> bool:
        """True if the loss of a place depends on others of its row; one of a file may."""
        own = bool(self.loss_terms) or is_extension(self.loss_type)
        return own or self.loss_type in WHOLE_ROW_LOSSES

    def problems(self, path: str) -> Iterator[str]:
        yield from super().problems(path)
        if self.loss_type == "dro" and self.dro_beta is None:
            yield f"`{path}.dro_beta` must be set with `{path}.loss_type=dro`, for example to 0.1"
        adaptive = self.adaptive_entropy
        low, high = adaptive.min_entropy_coef, adaptive.max_entropy_coef
        if adaptive.enabled and not low <= self.entropy_coef <= high:
            yield (
                f"`{path}.entropy_coef` ({self.entropy_coef}), the initial adaptive coefficient, must be from"
                f" `{path}.adaptive_entropy.min_entropy_coef` ({low}) to"
                f" `{path}.adaptive_entropy.max_entropy_coef` ({high})"
            )
        if self.clip_cov_lb >= self.clip_cov_ub:
            low, high = self.clip_cov_lb, self.clip_cov_ub
            yield f"`{path}.clip_cov_lb` ({low}) must be below `{path}.clip_cov_ub` ({high})"


@dataclass(frozen=True)
class CriticConfig(TrainedModelConfig):
    """Value model and its update."""

    strategy: str = _strategy_option()
    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(16, "values")
    cliprange_value: float = option(0.5, "Clipping range of values around the old values.", minimum=0.0)
    loss_avg_mode: str = _loss_avg_option("Aggregation of the loss, see `worker.actor.loss_avg_mode`.")
    ppo_epochs: int = option(1, "Epochs over a rollout batch.", minimum=1)
    padding_free: bool = option(False, "Remove padding before the model.")
    ulysses_size: int = option(1, "Ranks that share a sequence.", minimum=1)


@dataclass(frozen=True)
class PrimeConfig(TrainedModelConfig):
    """Implicit process reward model of PRIME, trained together with the policy."""

    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(16, "process rewards")
    max_grad_norm: float = option(10.0, "Maximum gradient norm; gradients are clipped to it.", minimum=TINY)
    beta: float = option(0.05, "Scale of the log-ratio in the process reward.", minimum=TINY)
    update: str = option("before", "Update the model before or after scoring.", choices=("before", "after"))
    model: ModelConfig = option(ModelConfig, "Model; if `model_path` is null, the actor's model.")


@dataclass(frozen=True)
class RewardModelConfig:
    """Sequence classification model that scores responses on the training devices."""

    micro_batch_size_per_device: MicroBatchSize = micro_batch_option(16, "scoring")
    coef: float = option(1.0, "Weight of its score, which is added to the reward function's `overall`.")
    model: ModelConfig = option(ModelConfig, "Model; if `model_path` is null, no reward model is used.")
    fsdp: FSDPConfig = option(FSDPConfig, "Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, "Offloading between uses.")

    @property
    def is_used(self) -> bool:
        return self.model.model_path is not None


@dataclass(frozen=True)
class RefConfig:
    """Frozen reference policy; model, micro batches and packing are the actor's."""

    strategy: str = _strategy_option()
    ulysses_size: int = option(1, "Ranks that share a sequence.", minimum=1)
    cached_embeds_dir: str | None = option(None, "Folder that caches features of a frozen vision tower.")
    vila_model: bool = option(False, "The model belongs to the VILA family.")
    diffusion: bool = option(False, "The model generates images or videos.")
    guidance_scale: float = option(4.5, "Classifier-free guidance scale of diffusion.")
    scheduler: str = option("", "Noise schedule of diffusion.")
    fsdp: FSDPConfig = option(FSDPConfig, "Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, "Offloading.", example={"offload_params": "auto"})


@dataclass(frozen=True)
class RewardConfig:
    """Reward function."""

    reward_function: str | None = option(
        None,
        "Reward function as `file.py:function`; the default name of the function is `main`.",
        resolve=function_in_file,
        example="./examples/reward_function/math.py:compute_score",
    )
    reward_function_kwargs: dict[str, Any] = option(dict, "Keyword arguments of the function.")
    reward_type: str = option(
        "batch", "Calling convention without `REWARD_TYPE`.", choices=("batch", "sequential", "dataproto")
    )
    skip_special_tokens: bool = option(True, "Remove special tokens from the response text.")
    num_cpus: int = option(1, "Number of scoring processes.", minimum=1)
    timeout_s: float = option(300.0, "Time limit of a call of the function in seconds.", minimum=TINY)
    batch_size: int = option(
        -1, "Responses per `batch` call; -1 is whole groups as they finish.", minimum=1, also=(-1,)
    )
    max_concurrency: int = option(32, "Concurrent calls of an `async def` function per process.", minimum=1)
    memory_limit_gb: float | None = option(None, "GiB per scoring process; null is unlimited.", minimum=0.1)
    max_retries: int = option(1, "Retries of a failed call (error, timeout, crash, memory).", minimum=0)
    on_failure: str = option(
        "error",
        "Handling of a response whose call keeps failing: end the run, mask it in the loss, or assign"
        " `failure_score`.",
        choices=("error", "mask", "score"),
    )
    failure_score: float = option(0.0, "`overall` of failed responses with `on_failure=score`.")
    max_failure_ratio: float = option(
        0.1, "Fraction of failures per engine call above which the run ends.", minimum=0.0, maximum=1.0
    )
    overlong_buffer_length: int = option(
        0, "Tokens before `data.max_response_length` with a falling score (DAPO); 0 is none.", minimum=0
    )
    overlong_penalty_factor: float = option(1.0, "Overlong penalty at the maximum length.", minimum=0.0)
    diffusion: bool = option(False, "Score images or videos.")


@dataclass(frozen=True)
class WorkerConfig:
    """Models, rollout engine and reward function."""

    hybrid_engine: bool = option(
        True, "Train and sample in the same processes; false samples in `trainer.n_gpus_for_rollout` others."
    )
    vila_model: bool = option(False, "The model belongs to the VILA family.")
    is_omni: bool = option(False, "The model takes audio.")
    actor: ActorConfig = option(
        ActorConfig,
        "Policy and its update.",
        example={
            "global_batch_size": 128,
            "micro_batch_size_per_device_for_update": 1,
            "micro_batch_size_per_device_for_experience": 2,
            "offload": {"offload_params": "auto", "offload_optimizer": "auto"},
        },
    )
    critic: CriticConfig = option(
        CriticConfig, "Value model; used by the advantage estimators `gae` and `turn_gae`."
    )
    prime: PrimeConfig = option(PrimeConfig, "Process reward model; used by `algorithm.adv_estimator=prime`.")
    reward_model: RewardModelConfig = option(
        RewardModelConfig, "Reward model that scores responses in addition to the reward function."
    )
    ref: RefConfig = option(RefConfig, "Frozen reference policy.")
    rollout: RolloutConfig = option(RolloutConfig, "Rollout engine.")
    reward: RewardConfig = option(RewardConfig, "Reward function.")

    @property
    def scoring(self) -> RewardConfig:
        """The options of the reward, with the function that the run calls."""
        if not self.rollout.open_ended_reward:
            return self.reward
        return replace(self.reward, reward_function=OPEN_ENDED)

    @property
    def scores_when_sampled(self) -> bool:
        """True if responses have a score without a reward model."""
        return self.scoring.reward_function is not None or self.rollout.multi_turn.earns_rewards

    def notes(self, path: str) -> Iterator[str]:
        given = self.reward.reward_function
        if self.rollout.open_ended_reward and given not in (None, OPEN_ENDED):
            yield (
                f"`{path}.reward.reward_function` ({given}) is not called, because"
                f" `{path}.rollout.open_ended_reward=true` chooses {OPEN_ENDED}"
            )
