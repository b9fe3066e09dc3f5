# SPDX-License-Identifier: Apache-2.0
"""Section `distillation`: teachers of the policy, and the loss or reward that pulls it towards them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl.config.algorithm import KL_NAMES
from verl.config.files.model_files import folder_problem, tokenizer_of
from verl.config.files.paths import model_source
from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig
from verl.config.schema import option

FORWARD, REVERSE = EXACT = ("forward_kl", "reverse_kl")
FORWARD_TOP, REVERSE_TOP = TOP = ("forward_kl_topk", "reverse_kl_topk")
SAMPLED = tuple(name for name in KL_NAMES if name not in ("full", "flow_grpo"))
ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k1+": "kl+", "k3+": "low_var_kl+"}  # verl's
TEACHERS = "distillation.teacher_models"


@dataclass(frozen=True)
class DistillationLossConfig:
    """Divergence from the teacher, as a loss or as a reward of each token."""

    loss_mode: str = option(
        REVERSE,
        "KL(student || teacher) or KL(teacher || student), over the whole vocabulary or the teacher's `topk`"
        " tokens; or an estimator on the sampled tokens: `k1`, `k2`, `k3`, or a name of"
        " `algorithm.kl_penalty`.",
        choices=(*EXACT, *TOP, *SAMPLED, *ALIASES),
        resolve=lambda name: ALIASES.get(name, name),
    )
    topk: int = option(64, "Tokens of the teacher in the `topk` modes.", minimum=1)
    use_task_rewards: bool = option(
        True, "Also learn from rewards, in fine-tuning from the data; false learns from the teacher alone."
    )
    distillation_loss_coef: float = option(1.0, "Weight of the divergence.", minimum=0.0)
    use_policy_gradient: bool = option(
        False, "Take the negative divergence of each sampled token as its reward, not as a loss."
    )

    @property
    def is_exact(self) -> bool:
        return self.loss_mode in EXACT

    @property
    def is_top(self) -> bool:
        return self.loss_mode in TOP

    @property
    def is_forward(self) -> bool:
        """True for KL(teacher || student)."""
        return self.loss_mode in (FORWARD, FORWARD_TOP)

    @property
    def reads_sampled_tokens(self) -> bool:
        """True if log-probs of the sampled tokens are all that it needs from the teacher."""
        return self.loss_mode in SAMPLED

    def problems(self, path: str) -> Iterator[str]:
        mode = f"`{path}.loss_mode`"
        if self.use_policy_gradient and not self.reads_sampled_tokens:
            yield (
                f"{mode} must be an estimator on sampled tokens with `{path}.use_policy_gradient=true`, got"
                f" {self.loss_mode!r}, which rewards all tokens of the vocabulary alike: set it to k1"
            )
        if not self.use_policy_gradient and self.loss_mode == "kl":
            yield (
                f"{mode} must not be 'kl' (k1) as a loss, whose expected gradient is zero: set"
                f" `{path}.use_policy_gradient=true`, or another mode such as reverse_kl or k3"
            )


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model that the policy learns from. Its tokenizer must be the policy's."""

    model_path: str | None = option(None, "Folder or hub name.", resolve=model_source)
    server: str | None = option(
        None, "Name in `reward_servers` of the model, of `kind=teacher`, which is asked instead of loaded."
    )
    tokenizer_path: str | None = option(
        None,
        "Folder or hub name of the tokenizer and processor; null is `model_path`, and must be set with"
        " `server`.",
        resolve=model_source,
    )
    trust_remote_code: bool = option(False, "Allow Python code that comes with the model.")
    key: str | None = option(
        None, "Value of the column `distillation.teacher_key` in its rows; null is the name of the section."
    )
    num_video_frames: int | None = option(
        None,
        "Frames per video that it sees, usually more than the policy; null is what the policy sees.",
        minimum=2,
    )
    tokens_per_frame: int | None = option(
        None, "Maximum tokens per video frame, with `num_video_frames`; null is the policy's.", minimum=1
    )
    max_prompt_length: int | None = option(
        None, "Maximum length of its prompts in tokens, with `num_video_frames`.", minimum=1
    )
    fsdp: FSDPConfig = option(FSDPConfig, "Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, "Offloading between uses.")

    def __post_init__(self) -> None:
        if self.tokenizer_path is None:
            object.__setattr__(self, "tokenizer_path", tokenizer_of(self.model_path))

    @property
    def model(self) -> ModelConfig:
        """The teacher as a model of the config, like any other."""
        return ModelConfig(
            model_path=self.model_path,
            tokenizer_path=self.tokenizer_path,
            trust_remote_code=self.trust_remote_code,
        )

    def problems(self, path: str) -> Iterator[str]:
        if (self.num_video_frames is None) != (self.max_prompt_length is None):
            yield (
                f"`{path}.num_video_frames` and `{path}.max_prompt_length` must be set together: prompts with"
                " more frames have more tokens"
            )
        if self.tokens_per_frame is not None and self.num_video_frames is None:
            yield f"`{path}.tokens_per_frame` has no effect without `{path}.num_video_frames`: set that too"
        if self.server is not None:
            yield from self._server_problems(path)
        elif self.model_path is None:
            yield f"`{path}.model_path` must be set: a model folder or a hub name"
        elif (problem := folder_problem(self.model_path, path, has_lora=False)) is not None:
            yield f"`{path}.model_path` {problem}"

    def _server_problems(self, path: str) -> Iterator[str]:
        if self.model_path is not None:
            yield (
                f"`{path}.model_path` must be null with `{path}.server`, whose model is that of"
                f" `reward_servers.{self.server}`: remove one of them"
            )
        if self.tokenizer_path is None:
            yield (
                f"`{path}.tokenizer_path` must be set with `{path}.server`: its tokenizer is compared with"
                " the policy's, and the server does not show it"
            )
        if self.num_video_frames is not None:
            yield f"`{path}.num_video_frames` must be null with `{path}.server`: it is asked about text only"


@dataclass(frozen=True)
class DistillationConfig:
    """Teachers of the policy."""

    enabled: bool = option(False, "Learn from teachers.")
    teacher_key: str = option(
        "data_source", "Column of the data that names the teacher of a row; read if there are several."
    )
    teacher_models: dict[str, TeacherConfig] = option(dict, "Teachers, by name.")
    distillation_loss: DistillationLossConfig = option(
        DistillationLossConfig, "Divergence from the teacher, as a loss or as a reward of each token."
    )

    @property
    def teachers(self) -> Mapping[str, TeacherConfig]:
        """The teachers of the run, by name; none if it has no distillation."""
        return self.teacher_models if self.enabled else {}

    @property
    def served(self) -> Mapping[str, TeacherConfig]:
        """The teachers that run behind a server."""
        return {name: teacher for name, teacher in self.teachers.items() if teacher.server is not None}

    @property
    def loaded(self) -> Mapping[str, TeacherConfig]:
        """The teachers that the training processes load."""
        return {name: teacher for name, teacher in self.teachers.items() if teacher.server is None}

    @property
    def sharding(self) -> dict[str, FSDPConfig]:
        """Section `fsdp` of each loaded teacher, by the section of the teacher."""
        return {f"{TEACHERS}.{name}": teacher.fsdp for name, teacher in self.loaded.items()}

    @property
    def is_alone(self) -> bool:
        """True if the policy learns from teachers and not from rewards."""
        return self.enabled and not self.distillation_loss.use_task_rewards

    @property
    def rewards_tokens(self) -> bool:
        return self.enabled and self.distillation_loss.use_policy_gradient

    @property
    def reads_teacher_log_probs(self) -> bool:
        """True if a pass before the update computes the teachers' log-probs of the sampled tokens."""
        return self.enabled and self.distillation_loss.reads_sampled_tokens

    @property
    def compares_in_update(self) -> bool:
        """True if the teachers run in the update, which compares whole distributions."""
        return self.enabled and not self.distillation_loss.reads_sampled_tokens

    @property
    def keys(self) -> dict[str, str]:
        """The name of each teacher by the value of the column in its rows."""
        return {teacher.key or name: name for name, teacher in self.teachers.items()}

    def problems(self, path: str) -> Iterator[str]:
        if self.enabled and not self.teacher_models:
            yield (
                f"`{path}.teacher_models` must have a teacher with `{path}.enabled=true`: set"
                f" `{path}.teacher_models.NAME.model_path`"
            )
        if self.teacher_models and not self.enabled:
            yield f"`{path}.enabled` must be true with teachers in `{path}.teacher_models`, got false"
        if len(self.keys) < len(self.teachers):
            keys = [teacher.key or name for name, teacher in self.teachers.items()]
            yield f"`{path}.teacher_models`: each teacher must have a `key` of its own, got {keys}"
