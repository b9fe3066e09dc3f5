# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation as calls: `verl.train`, `verl.build` and `verl.evaluate`.

Importing this module imports no torch; a call does, once its config is right.
"""

import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from verl.checkpoint.tracker import CheckpointRecord, read_record
from verl.config.ppo import PPOConfig
from verl.config.python_values import Source, arguments_of
from verl.config.schema import ConfigError, config_notes
from verl.config.sft import SFTConfig
from verl.planning.device_defaults import load_run_config
from verl.planning.planned_run import planned_ppo, planned_sft
from verl.trainer.command import check_run, check_weights
from verl.trainer.evaluation.model_folder import loadable
from verl.trainer.evaluation.report import Evaluation, Question
from verl.trainer.first_look import look_at_prompts
from verl.trainer.run.run_lock import locked_run_folder
from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.rank_logger import ROOT, get_logger
from verl.utils.version_check import check_versions, name_clash
from verl.workers.warm_up import imports_of

if TYPE_CHECKING:
    from verl.trainer.ray_trainer import RayPPOTrainer
    from verl.trainer.sft_trainer import SFTTrainer
    from verl.trainer.training_loop import TrainingLoop

Kind = Literal["rl", "sft"]
Config = PPOConfig | SFTConfig
AnyConfig = Source | Config
Options = Mapping[str, Any]  # by key, or by section and key
ConfigReader = Callable[[Options], PPOConfig]
RESTARTS = (
    "`trainer.max_restarts` must be 0 for a run in this process, got {}: a restart needs one of its own,"
    " which the commands `verl-train` and `verl-sft` start"
)
MODEL_PATH = "worker.actor.model.model_path"
CATEGORY_KEYS = "data.category_keys"
DEFAULT_OUT = "evaluations"
EVALUATION_OPTIONS: dict[str, Any] = {  # of a config, whose run trains
    "data.train_files": "",
    "trainer.val_only": True,
    "trainer.find_last_checkpoint": False,
    "trainer.load_checkpoint_path": None,
    "trainer.logger": ["file"],
    "trainer.max_restarts": 0,
    "trainer.viewer_port": None,
    "worker.hybrid_engine": True,  # nothing trains, so that all devices sample
    "trainer.n_gpus_for_rollout": 0,
    "trainer.async_training.mode": "off",
    "trainer.async_training.max_gpus_for_rollout": None,
}
NO_OVERRIDES: Options = {}


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run."""

    step: int  # done last
    training_steps: int  # of the whole run; more than `step` if a signal stopped it
    metrics: dict[str, float]  # of the last step, as the loggers had them
    validation: dict[str, float]  # of the last validation
    best_validation: float | None  # highest `val/reward_score`, or -`val/loss` of fine-tuning
    best_step: int | None  # that it was validated after
    checkpoint: Path | None  # the last `global_step_N`; None if nothing was saved
    best_checkpoint: Path | None  # of those whose step was validated
    folder: Path  # of checkpoints, logs and rollouts


def train(
    config: AnyConfig, overrides: Options = NO_OVERRIDES, /, *, kind: Kind = "rl", **sections: Options
) -> TrainingResult:
    """Train to the last step, as the command `verl-train` does, in this process.

    Args:
        config: A YAML file, its sections as a mapping, or a config object.
        overrides: Options by their dotted keys: `{"worker.actor.optim.lr": 1e-6}`.
        kind: "sft" for the options of `verl-sft`; a config object says it by its type.
        sections: Options by section: `trainer={"max_steps": 2}`. They win over `overrides`.

    Raises:
        ConfigError: Options are wrong; `problems` has each of them.
        ValueError: Data, models or the reward function cannot be used.
        RuntimeError: The machine is unsuitable, or the run failed.
    """
    with _opened(read_config(config, overrides, sections, kind)) as trainer:
        trainer.fit()
    return result_of(trainer)


@overload
def build(
    config: SFTConfig, overrides: Options = ..., /, *, kind: Kind = ..., **sections: Options
) -> AbstractContextManager["SFTTrainer"]: ...


@overload
def build(
    config: Source, overrides: Options = ..., /, *, kind: Literal["sft"], **sections: Options
) -> AbstractContextManager["SFTTrainer"]: ...


@overload
def build(
    config: Source | PPOConfig, overrides: Options = ..., /, *, kind: Literal["rl"] = ..., **sections: Options
) -> AbstractContextManager["RayPPOTrainer"]: ...


def build(
    config: AnyConfig, overrides: Options = NO_OVERRIDES, /, *, kind: Kind = "rl", **sections: Options
) -> AbstractContextManager[Any]:
    """Open a run, whose workers live inside the block; looping over the trainer trains. See `train`.

    A signal ends the loop after the step that runs, which is saved. After the block it reaches the caller's
    own handler: Ctrl-C is a `KeyboardInterrupt` there.

    Example::

        with verl.build("run.yaml") as trainer:
            for step in trainer:
                if step.metrics["reward/overall"] > 0.9:
                    break
            trainer.save()
    """
    return _opened(read_config(config, overrides, sections, kind))


def evaluate(
    config: Source | PPOConfig,
    overrides: Options = NO_OVERRIDES,
    /,
    *,
    model: str | os.PathLike[str] | None = None,
    samples: int | None = None,
    ks: Sequence[int] = (),
    by: str | Sequence[str] | None = None,
    correct_key: str | None = None,
    correct_at: float = 1.0,
    keep: int = 256,
    out: str | os.PathLike[str] | None = None,
    **sections: Options,
) -> Evaluation:
    """Score a model's responses to `data.val_files`, with the rewards and the sampling of a run's validation.

    Args:
        config: The config of a run, as for `train`.
        model: A model's folder, a hub name or a checkpoint (`global_step_N`); None is the config's.
        samples: Responses to each prompt; None is `worker.rollout.val_override_config.n`, or 1.
        ks: Numbers of pass@k; () is 1, 2, 4, ... and the number of samples.
        by: Column of the rows whose values are categories, or several; None is `data.category_keys`.
        correct_key: Value of the reward function that says what is correct; None is `accuracy`, or `overall`.
        correct_at: Least value of a correct response.
        keep: Prompts whose responses are written for the viewer.
        out: Folder of the report and of the responses, which the viewer opens; None is
            evaluations/NAME below the working directory.

    Raises:
        ConfigError: Options are wrong; `problems` has each of them.
        ValueError: Data, models or the reward function cannot be used.
        RuntimeError: The machine is unsuitable, or a worker failed.
    """
    layers = [overrides, sections, evaluation_options(model, samples, by)]

    def read(own: Options) -> PPOConfig:
        return load_run_config(PPOConfig, arguments_of(PPOConfig, config, [*layers, own]))

    return evaluate_model(read, Question(ks, correct_key, correct_at, keep), out)


def evaluation_options(model: Any, samples: int | None, by: str | Sequence[str] | None) -> dict[str, Any]:
    """Return the options that replace those of a run; None leaves the run's own."""
    options = {MODEL_PATH: model, "worker.rollout.val_override_config.n": samples, CATEGORY_KEYS: by}
    return {key: value for key, value in options.items() if value is not None}


def evaluate_model(
    read: ConfigReader, question: Question, out: str | os.PathLike[str] | None = None
) -> Evaluation:
    """Evaluate the model of a config; `read` returns the config with some options replaced."""
    folder = os.path.abspath(out or DEFAULT_OUT)
    own = EVALUATION_OPTIONS | {"trainer.save_checkpoint_path": folder}

    def evaluated(options: Options) -> PPOConfig:
        config = read(options)
        return replace(config, data=config.data.without_training())

    config = evaluated(own)  # its problems come before anything is loaded
    model = config.worker.actor.model
    assert model.model_path is not None, "required when the config was checked"
    if config.trainer.diffusion:
        raise ValueError(
            "an evaluation is of texts, and `trainer.diffusion=true` makes pictures: validate with"
            " `trainer.val_only=true`"
        )
    with ExitStack() as stack:
        stack.enter_context(restored_process())
        repair_cuda_builds()
        check_versions(config.worker.rollout.name)
        check_weights(planned_ppo(config), loads=True)
        look_at_prompts(config.data, config.worker, config.reward_servers)
        trust = model.trust_remote_code
        found = stack.enter_context(loadable(model.model_path, trust_remote_code=trust))
        if out is None:
            own |= {"trainer.save_checkpoint_path": os.path.join(folder, found.name)}
        config = evaluated(own | {MODEL_PATH: found.path})
        # Imported here so that a wrong config is reported before torch, Ray and vLLM load.
        from verl.trainer.evaluation.evaluator import build_evaluator  # noqa: PLC0415
        from verl.trainer.prepare import prepare_run  # noqa: PLC0415

        stack.enter_context(locked_run_folder(config.trainer))
        run = prepare_run(config, planned_ppo, stack, warm_up=imports_of(config.worker))
        evaluator = build_evaluator(run, stack, question)
        evaluation = evaluator.evaluate(model.model_path, found.step, question)
        evaluation.write()
    return evaluation


def result_of(trainer: "TrainingLoop") -> TrainingResult:
    """Collect what a trainer has done so far."""
    state, folder = trainer.run_state, Path(trainer.run.checkpoint_folder)
    record = read_record(folder) or CheckpointRecord()
    step, score = state.best or (None, None)
    found = record.best_val_reward_score
    if found is not None and (score is None or found > score):
        step, score = record.best_global_step, found  # before this run was resumed
    return TrainingResult(
        step=state.step,
        training_steps=state.training_steps,
        metrics=dict(trainer.last_metrics),
        validation=dict(trainer.last_validation),
        best_validation=score,
        best_step=step,
        checkpoint=state.saved,
        best_checkpoint=None if record.best_actor_path is None else Path(record.best_actor_path).parent,
        folder=folder,
    )


def read_config(config: AnyConfig, overrides: Options, sections: Options, kind: Kind = "rl") -> Config:
    """Read a config as the commands do; their notes become warnings."""
    if kind not in ("rl", "sft"):
        raise ValueError(f"`kind` must be 'rl' or 'sft', got {kind!r}")
    is_sft = isinstance(config, SFTConfig) or (kind == "sft" and not isinstance(config, PPOConfig))
    wanted, other = (SFTConfig, PPOConfig) if is_sft else (PPOConfig, SFTConfig)
    values = [overrides, sections]
    try:
        read = load_run_config(wanted, arguments_of(wanted, config, values))
    except ConfigError as error:
        if isinstance(config, Config) or not _fits(other, config, values):
            raise
        name, own = ("reinforcement learning", "rl") if is_sft else ("fine-tuning", "sft")
        hint = f"these are the options of {name}: pass `kind={own!r}`"
        raise ConfigError([*error.problems, hint]) from None
    if read.trainer.max_restarts > 0:
        raise ConfigError([RESTARTS.format(read.trainer.max_restarts)])
    for note in filter(None, [*config_notes(read), name_clash()]):
        warnings.warn(note, stacklevel=4)
    return read


def _fits(cls: type[Any], config: Any, values: Sequence[Options]) -> bool:
    try:
        load_run_config(cls, arguments_of(cls, config, values))
    except ConfigError:
        return False
    return True


@contextmanager
def _opened(config: Config) -> Iterator["TrainingLoop"]:
    with restored_process():
        repair_cuda_builds()
        # Imported here so that a wrong config is reported before torch, Ray and vLLM load.
        from verl.trainer.run.run_once import run_in_process  # noqa: PLC0415

        check_versions(config.engine)
        with locked_run_folder(config.trainer):
            check_run(config.trainer)
            run = planned_sft(config) if isinstance(config, SFTConfig) else planned_ppo(config)
            check_weights(run, loads=True)
            with run_in_process(config) as trainer:
                yield trainer
    if trainer.stop.signal is not None:
        signal.raise_signal(trainer.stop.signal)


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore the environment, and remove the handler of our loggers if there was none before."""
    environment = dict(os.environ)
    root = logging.getLogger(ROOT)
    handlers, level = list(root.handlers), root.level
    get_logger(ROOT)  # after another run has removed its handler
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
