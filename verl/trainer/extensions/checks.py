# SPDX-License-Identifier: Apache-2.0
"""Extensions of a run, functions and classes in a user's files, and their checks on tiny inputs.

To add a kind, give an option `extension="KIND"` and add a row to `KINDS`. An extension itself is found by the
registry of its kind, in the controller and in the workers alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.config.trainer import RunTree
from verl.data.dataset import DATASETS
from verl.data.loader import SAMPLERS
from verl.logger.base import LOGGERS
from verl.models.families.registry import OWN_FAMILIES
from verl.optim.build import OPTIMIZERS
from verl.optim.schedules import SCHEDULES
from verl.trainer.extensions.algorithms import (
    check_estimator,
    check_family,
    check_kl,
    check_loss,
    check_observer,
    check_optimizer,
    check_schedule,
    check_term,
)
from verl.trainer.extensions.protocol import ProtocolError, UsedExtension, extensions_in
from verl.trainer.extensions.rollouts import (
    AGENTS,
    ENVIRONMENTS,
    TOOLS,
    check_agent,
    check_dataset,
    check_engine,
    check_environment,
    check_logger,
    check_sampler,
    check_tool,
)
from verl.utils.rank_logger import get_logger
from verl.utils.registry import HEADING, Registry, place_of
from verl.utils.user_file import describe_error
from verl.workers.packing.observers import OBSERVERS
from verl.workers.roles.loss_terms import LOSS_TERMS
from verl.workers.rollout.engines import ROLLOUT_ENGINES

logger = get_logger(__name__)


class Kind(NamedTuple):
    """A kind of extension."""

    registry: Registry[Any]
    protocol: str  # how it is called, for errors
    check: Callable[[Any, UsedExtension, RunTree], None]  # raises for what breaks the protocol


KINDS: dict[str, Kind] = {
    "advantage estimator": Kind(
        ADV_ESTIMATORS, "a function of AdvantageInputs that returns Advantages", check_estimator
    ),
    "policy loss": Kind(
        POLICY_LOSSES, "a function of PolicyLossInputs that returns a PolicyLoss", check_loss
    ),
    "loss term": Kind(LOSS_TERMS, "a LossTerm of verl.workers.roles.loss_terms", check_term),
    "forward observer": Kind(
        OBSERVERS, "a class derived from verl.workers.packing.observers.ForwardObserver", check_observer
    ),
    "KL estimator": Kind(KL_ESTIMATORS, "a function of log-ratios (B, R) that returns (B, R)", check_kl),
    "learning-rate schedule": Kind(
        SCHEDULES, "a function of Position and `optim` that returns a factor of the peak", check_schedule
    ),
    "optimizer": Kind(
        OPTIMIZERS,
        "a function of model, parameter groups and `optim` that returns an Optimizer",
        check_optimizer,
    ),
    "logger": Kind(LOGGERS, "a class derived from verl.logger.base.Logger", check_logger),
    "dataset": Kind(
        DATASETS, "a class derived from RLHFDataset, or SFTDataset in fine-tuning", check_dataset
    ),
    "sampler": Kind(SAMPLERS, "a class derived from verl.data.order.RowSampler", check_sampler),
    "rollout engine": Kind(
        ROLLOUT_ENGINES, "a class, or function, of `worker.rollout` and EngineSetup", check_engine
    ),
    "model family": Kind(OWN_FAMILIES, "a Family of verl.models.families.interface", check_family),
    "tool": Kind(TOOLS, "a function with type hints and a docstring, or a class", check_tool),
    "environment": Kind(
        ENVIRONMENTS, "a class with `reset(row)`, `step(text, calls)` and `close()`", check_environment
    ),
    "agent": Kind(AGENTS, "a function of a row and the policy, which may be async", check_agent),
}


def check_extensions(config: RunTree) -> None:
    """Load each extension of a config and call it on tiny inputs.

    Raises:
        ValueError: One cannot be loaded, raises, or breaks its protocol; the message has its file and line.
    """
    for used in extensions_in(config):
        kind = KINDS[used.kind]
        extension = kind.registry[used.spec]
        where = f"`{used.option}`: {place_of(used.spec, extension)}"
        try:
            kind.check(extension, used, config)
        except ProtocolError as error:
            raise ValueError(f"{where} {error}. A {used.kind} is {kind.protocol}") from error
        except Exception as error:  # whatever code of the user raises
            what = describe_error(error, used.file, HEADING)
            raise ValueError(
                f"{where} failed on tiny inputs before the run. A {used.kind} is {kind.protocol}. It raised"
                f" {what}"
            ) from error
        logger.info("extension: option=%s %s", used.option, place_of(used.spec, extension))
