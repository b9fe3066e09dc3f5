# SPDX-License-Identifier: Apache-2.0
"""Options of the processes that hold the models: actor, critic, reference, reward models, reward function.

An option whose feature is not built is declared all the same, with `unavailable="..."`: it is accepted at its
neutral value and refused by name otherwise. Whoever builds the feature deletes that argument.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.model import TINY, FSDPConfig, ModelConfig, OffloadConfig
from verl.config.paths import function_in_file
from verl.config.rollout import DIFFUSION, VILA, RolloutConfig
from verl.config.schema import option
from verl.config.update_options import MicroBatchSize, PolicyConfig, TrainedModelConfig, micro_batch_option

LOSS_AVG_MODES = ("token", "seq", "seq_sum", "seq_sum_norm")
LOSS_AVG_ALIASES = {  # verl's names
    "token-mean": "token",
    "seq-mean-token-mean": "seq",
    "seq-mean-token-sum": "seq_sum",
    "seq-mean-token-sum-norm": "seq_sum_norm",
}


def loss_avg_mode(name: str) -> str:
    """Return the name of an aggregation for it or for verl's name of it."""
    return LOSS_AVG_ALIASES.get(name, name)


@dataclass(frozen=True)
class AdaptiveEntropyConfig:
    """Steers the weight of the entropy bonus (Skywork-OR1)."""

    enabled: bool = option(False, help="Move the weight of the entropy bonus towards a target entropy.")
    target_entropy: float = option(
        0.2, help="Entropy in nats for each token below which the bonus applies.", minimum=0.0
    )
    delta_entropy_coef: float = option(1e-4, help="Change of the weight in a step.", minimum=0.0)
    max_entropy_coef: float = option(5e-3, help="Largest weight.", minimum=0.0)
    min_entropy_coef: float = option(0.0, help="Smallest weight.", minimum=0.0)

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong between the bounds."""
        if self.min_entropy_coef > self.max_entropy_coef:
            low, high = self.min_entropy_coef, self.max_entropy_coef
            yield f"`{path}.min_entropy_coef` ({low}) must be at most `{path}.max_entropy_coef` ({high})"


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    """The policy and its update."""

    strategy: str = option("fsdp", help="How the model is distributed.", choices=("fsdp",))
    clip_ratio_low: float = option(
        0.2, help="The ratio is clipped at 1 minus this.", minimum=0.0, maximum=1.0
    )
    clip_ratio_high: float = option(0.3, help="The ratio is clipped at 1 plus this.", minimum=0.0)
    clip_ratio_dual: float = option(
        3.0, help="For negative advantages the ratio counts at most this much (dual clip).", minimum=1.0
    )
    loss_avg_mode: str = option(
        "token",
        help="Mean over tokens (`token`), or over sequences of their means (`seq`), sums (`seq_sum`) or"
        " sums / `data.max_response_length` (`seq_sum_norm`).",
        choices=(*LOSS_AVG_MODES, *LOSS_AVG_ALIASES),
        resolve=loss_avg_mode,
    )
    loss_type: str = option(
        "default",
        help="Policy loss.",
        choices=(
            *("default", "gspo", "gspo_token", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov"),
            *("gpg", "dppo_tv", "dppo_kl", "dro", "sppo"),
        ),
    )
    clip_cov_ratio: float = option(
        2e-4, help="Share of a mini batch's tokens that `clip_cov` takes out.", minimum=0.0, maximum=1.0
    )
    clip_cov_lb: float = option(1.0, help="`clip_cov` takes tokens whose covariance is above this.")
    clip_cov_ub: float = option(5.0, help="`clip_cov` takes tokens whose covariance is below this.")
    kl_cov_ratio: float = option(
        2e-4, help="Share of a mini batch's tokens that `kl_cov` penalises.", minimum=0.0, maximum=1.0
    )
    ppo_kl_coef: float = option(
        0.1, help="Weight of the penalty of the tokens that `kl_cov` chooses.", minimum=0.0
    )
    dro_beta: float | None = option(
        None, help="Weight of the squared log-ratio in the `dro` loss; required by it.", minimum=TINY
    )
    sppo_eta: float = option(
        1.0, help="Scale of the advantage that `sppo` regresses the log-ratio to.", minimum=TINY
    )
    entropy_coef: float = option(0.0, help="Weight of the entropy bonus.", minimum=0.0)
    adaptive_entropy: AdaptiveEntropyConfig = option(
        AdaptiveEntropyConfig, help="Steers the entropy bonus, which starts at `entropy_coef`."
    )
    ppo_epochs: int = option(1, help="Passes over a rollout batch.", minimum=1)
    padding_free: bool = option(
        True,
        help="Remove padding before the model.",
        inert="sequences are always packed, the result is the same",
    )
    share_prompt: bool = option(
        True, help="Run a prompt once for all of its responses in training, where the model allows it."
    )
    use_torch_compile: bool = option(
        True,
        help="Compile the log-prob function.",
        inert="log-probs come from a fused function without compilation",
    )
    tau_positive: float = option(
        1.0, help="Temperature for advantages >= 0 in the `sapo` loss.", minimum=TINY
    )
    tau_negative: float = option(
        1.05, help="Temperature for advantages < 0 in the `sapo` loss.", minimum=TINY
    )
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    diffusion: bool = option(False, help="The model makes images or videos.", unavailable=DIFFUSION)
    guidance_scale: float = option(4.5, help="Classifier-free guidance of diffusion.", unavailable=DIFFUSION)
    scheduler: str = option("", help="Noise schedule of diffusion.", unavailable=DIFFUSION)

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong between the options of the loss, and with the folder of vision features."""
        yield from super().problems(path)
        if self.loss_type == "dro" and self.dro_beta is None:
            yield f"`{path}.dro_beta` must be set with `{path}.loss_type=dro`, for example to 0.1"
        adaptive = self.adaptive_entropy
        low, high = adaptive.min_entropy_coef, adaptive.max_entropy_coef
        if adaptive.enabled and not low <= self.entropy_coef <= high:
            yield (
                f"`{path}.entropy_coef` ({self.entropy_coef}), where the adaptive weight starts, must be from"
                f" `{path}.adaptive_entropy.min_entropy_coef` ({low}) to"
                f" `{path}.adaptive_entropy.max_entropy_coef` ({high})"
            )
        if self.clip_cov_lb >= self.clip_cov_ub:
            low, high = self.clip_cov_lb, self.clip_cov_ub
            yield f"`{path}.clip_cov_lb` ({low}) must be below `{path}.clip_cov_ub` ({high})"


@dataclass(frozen=True)
class CriticConfig(TrainedModelConfig):
    """The value model and its update."""

    strategy: str = option("fsdp", help="How the model is distributed.", choices=("fsdp",))
    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(
        16, "runs forward at once for values"
    )
    cliprange_value: float = option(0.5, help="Values move at most this far from the old ones.", minimum=0.0)
    loss_avg_mode: str = option(
        "token",
        help="Aggregation of the loss, as `worker.actor.loss_avg_mode`.",
        choices=(*LOSS_AVG_MODES, *LOSS_AVG_ALIASES),
        resolve=loss_avg_mode,
    )
    ppo_epochs: int = option(1, help="Passes over a rollout batch.", minimum=1)
    padding_free: bool = option(
        False,
        help="Remove padding before the model.",
        inert="sequences are always packed, the result is the same",
    )
    ulysses_size: int = option(
        1,
        help="Ranks that share one sequence.",
        minimum=1,
        inert="the actor's `ulysses_size` and `ring_size` hold for every model",
    )


@dataclass(frozen=True)
class PrimeConfig(TrainedModelConfig):
    """The implicit process reward model of PRIME, trained beside the policy."""

    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(
        16, "runs forward at once for process rewards"
    )
    max_grad_norm: float = option(10.0, help="Gradients are scaled down to this norm.", minimum=TINY)
    beta: float = option(0.05, help="Scale of the log-ratio that is the process reward.", minimum=TINY)
    update: str = option(
        "before",
        help="Train the model before or after it scores a step's responses.",
        choices=("before", "after"),
    )
    model: ModelConfig = option(
        ModelConfig, help="Which model; `model_path` null takes the actor's, as its frozen reference does."
    )


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence-classification model that scores responses on the training devices."""

    micro_batch_size_per_device: MicroBatchSize = micro_batch_option(16, "scores at once")
    coef: float = option(1.0, help="Weight of its score beside the reward function's `overall`.")
    model: ModelConfig = option(
        ModelConfig, help="Which model; without `model_path` there is no reward model."
    )
    fsdp: FSDPConfig = option(FSDPConfig, help="Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, help="What leaves the GPU while it is not used.")

    @property
    def is_used(self) -> bool:
        """Whether there is a reward model."""
        return self.model.model_path is not None


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy; model, micro batches and packing are the actor's."""

    strategy: str = option("fsdp", help="How the model is distributed.", choices=("fsdp",))
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    diffusion: bool = option(False, help="The model makes images or videos.", unavailable=DIFFUSION)
    guidance_scale: float = option(4.5, help="Classifier-free guidance of diffusion.", unavailable=DIFFUSION)
    scheduler: str = option("", help="Noise schedule of diffusion.", unavailable=DIFFUSION)
    fsdp: FSDPConfig = option(
        FSDPConfig, help="Sharding and number types.", example={"enable_cpu_offload": True}
    )
    offload: OffloadConfig = option(OffloadConfig, help="What leaves the GPU while it is not used.")


@dataclass(frozen=True)
class RewardConfig:
    """The function that scores responses."""

    reward_function: str | None = option(
        None,
        help="`file.py:function` that scores a response; the function is `main` if not named.",
        resolve=function_in_file,
        example="./examples/reward_function/math.py:compute_score",
    )
    reward_function_kwargs: dict[str, Any] = option(dict, help="Arguments passed to the function by name.")
    reward_type: str = option(
        "batch",
        help="Calling convention of a file that has no `REWARD_TYPE`.",
        choices=("batch", "sequential", "dataproto"),
    )
    skip_special_tokens: bool = option(True, help="Leave special tokens out of the response's text.")
    num_cpus: int = option(1, help="Processes that score at the same time.", minimum=1)
    timeout_s: float = option(300.0, help="Seconds one call of the function may take.", minimum=TINY)
    batch_size: int = option(
        -1,
        help="Responses in one call of a `batch` function; -1 is whole groups as they finish.",
        minimum=1,
        also=(-1,),
    )
    max_concurrency: int = option(
        32, help="Calls of an `async def` function that one process has open at a time.", minimum=1
    )
    memory_limit_gb: float | None = option(
        None, help="GiB that each process of the function may allocate; null sets no limit.", minimum=0.1
    )
    max_retries: int = option(
        1, help="Times a call is repeated that raises, is late, crashes or needs too much memory.", minimum=0
    )
    on_failure: str = option(
        "error",
        help="A response whose call keeps failing: ends the run, is masked from the loss, or gets a score.",
        choices=("error", "mask", "score"),
    )
    failure_score: float = option(0.0, help="`overall` of such a response with `on_failure=score`.")
    max_failure_ratio: float = option(
        0.1,
        help="The run ends where a larger share of the responses of one call of the engine fails.",
        minimum=0.0,
        maximum=1.0,
    )
    overlong_buffer_length: int = option(
        0,
        help="Tokens before `data.max_response_length` over which the score falls (DAPO); 0 is no penalty.",
        minimum=0,
    )
    overlong_penalty_factor: float = option(
        1.0, help="What a response of the full length loses by the overlong penalty.", minimum=0.0
    )
    diffusion: bool = option(False, help="Score images or videos.", unavailable=DIFFUSION)


@dataclass(frozen=True)
class WorkerConfig:
    """Everything that runs in the processes of the devices."""

    hybrid_engine: bool = option(
        True, help="Train and sample in the same processes.", unavailable="separate processes for sampling"
    )
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    is_omni: bool = option(False, help="The model hears audio.", unavailable="audio")
    actor: ActorConfig = option(
        ActorConfig,
        help="The policy and its update.",
        example={
            "global_batch_size": 128,
            "micro_batch_size_per_device_for_update": 1,
            "micro_batch_size_per_device_for_experience": 2,
            "offload": {"offload_params": True, "offload_optimizer": True},
        },
    )
    critic: CriticConfig = option(
        CriticConfig, help="The value model and its update; used by `algorithm.adv_estimator=gae`."
    )
    prime: PrimeConfig = option(
        PrimeConfig, help="The process reward model; used by `algorithm.adv_estimator=prime`."
    )
    reward_model: RewardModelConfig = option(
        RewardModelConfig, help="A model that scores responses beside the reward function."
    )
    ref: RefConfig = option(RefConfig, help="The frozen reference policy.")
    rollout: RolloutConfig = option(RolloutConfig, help="The engine that samples responses.")
    reward: RewardConfig = option(RewardConfig, help="The function that scores responses.")
