# SPDX-License-Identifier: Apache-2.0
"""Extensions of a run, which are functions and classes of a user's files, and their checks on tiny inputs.

To add a kind, give an option `extension="KIND"` and add a row to `KINDS`. An extension itself is found by the
registry of its kind, in the controller and in the workers alike.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.agents.environments.loading import load_environments
from verl.agents.tools.loading import load_tools
from verl.algorithms.advantages import ADV_ESTIMATORS, Advantages
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_loss_types import PolicyLossOptions
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from verl.algorithms.token_selection import SelectionInputs, TokenSelection, selection_of
from verl.batch_keys import BATCH_KEYS, BatchError
from verl.config.algorithm import AlgorithmConfig
from verl.config.files.extensions import is_extension
from verl.config.schema import list_options, value_at
from verl.config.trainer import RunTree
from verl.data.bad_rows import BadRow
from verl.data.dataset import RowDataset
from verl.data.loader import DATASETS, load_readers, media_options
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.logger.base import LOGGERS, Logger
from verl.models.families.interface import Family, MediaShape, VisionFamily
from verl.models.families.registry import OWN_FAMILIES, register_family
from verl.optim.build import OPTIMIZERS, parameter_groups
from verl.optim.schedules import SCHEDULES, Position
from verl.protocol import DataProto
from verl.trainer.core_algos import advantage_inputs
from verl.trainer.reward_samples import open_unchecked
from verl.utils.rank_logger import get_logger
from verl.utils.registry import HEADING, Registry, place_of
from verl.utils.user_file import describe_error, digest_of
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engines import ROLLOUT_ENGINES

STEPS, WARMUP = 20, 2  # of the run that a schedule is called for
LENGTH = 3  # tokens of a tiny response
IMAGE_TOKEN, VIDEO_TOKEN = 90, 91  # of a tiny vision-language model

logger = get_logger(__name__)


class UsedExtension(NamedTuple):
    """An extension that a config names."""

    option: str  # dotted key
    kind: str  # a key of `KINDS`
    spec: str  # `/absolute/file.py:NAME`

    @property
    def file(self) -> Path:
        return Path(self.spec.rpartition(":")[0])


class Kind(NamedTuple):
    """A kind of extension."""

    registry: Registry[Any]
    protocol: str  # how it is called, for errors
    check: Callable[[Any, UsedExtension, RunTree], None]  # raises for what breaks the protocol


class ProtocolError(ValueError):
    """An extension returned something that a run cannot use; the message follows the extension's name."""


def extensions_in(config: RunTree) -> Iterator[UsedExtension]:
    """Yield the extensions that a config names, in the order of its options."""
    for entry in list_options(type(config)):
        if entry.info.extension is not None:
            value = value_at(config, entry.key)
            for item in value if isinstance(value, tuple) else (value,):
                if is_extension(item):
                    yield UsedExtension(entry.key, entry.info.extension, item)


def extension_digests(config: RunTree) -> dict[str, str]:
    """Return the digest of each extension's file, by option and name."""
    return {f"`{used.option}` ({used.spec})": digest_of(used.file) for used in extensions_in(config)}


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


def check_estimator(estimator: Any, _used: UsedExtension, config: Any) -> None:
    """Call an estimator for two prompts: one has responses of different scores, one of equal scores."""
    algorithm: AlgorithmConfig = config.algorithm
    batch = _tiny_batch(algorithm, responses=min(config.worker.rollout.n, 4))
    result = estimator(advantage_inputs(batch, algorithm))
    if not isinstance(result, tuple) or len(result) != len(Advantages._fields):
        raise ProtocolError(f"must return Advantages(advantages, returns), got {_describe(result)}")
    for name, values in zip(Advantages._fields, result, strict=True):
        _check_tensor(name, values, batch.batch["loss_mask"].shape)


def check_loss(loss: Any, _used: UsedExtension, config: Any) -> None:
    """Call a loss for two responses and follow its gradient."""
    actor = config.worker.actor
    options = {entry.name: getattr(actor, entry.name) for entry in fields(PolicyLossOptions)}
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    old = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, 0.0]])
    log_probs = (old + torch.tensor([[0.01, -0.02, 0.03], [-0.01, 0.02, 0.0]])).requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
    inputs = {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages, "response_mask": mask}
    choose = selection_of("", loss)
    if choose is not None:
        inputs["selected"] = _check_selection(choose, inputs)
    result = loss(PolicyLossInputs(**inputs, **options))
    if not isinstance(result, PolicyLoss):
        raise ProtocolError(f"must return a PolicyLoss, got {_describe(result)}")
    _check_tensor("per_token", result.per_token, mask.shape)
    for name, values in result.statistics.items():
        _check_tensor(f"statistics[{name!r}]", values, mask.shape)
        if values.requires_grad:
            raise ProtocolError(f"must detach `statistics[{name!r}]`, which carries a gradient")
    _check_gradient("per_token", result.per_token, log_probs)


def check_kl(estimator: Any, _used: UsedExtension, config: Any) -> None:
    """Call a KL estimator for log-ratios of both signs, and for equal policies."""
    log_ratio = torch.tensor([[0.0, 0.5, -0.5], [2.0, -2.0, 0.0]], requires_grad=True)
    result = estimator(log_ratio)
    _check_tensor("the KL", result, log_ratio.shape)
    zeros = result[log_ratio == 0]
    if zeros.abs().max() > 1e-6:
        raise ProtocolError(f"must be 0 for a log-ratio of 0, as padding has, got {zeros.tolist()}")
    if config.algorithm.use_kl_loss:
        _check_gradient("the KL", result, log_ratio)


def check_schedule(schedule: Any, used: UsedExtension, config: Any) -> None:
    """Call a schedule for each step after the warm-up of a short run."""
    optim = value_at(config, used.option.rpartition(".")[0])
    for step in range(WARMUP, STEPS + 1):
        height = schedule(Position(step, WARMUP, STEPS), optim)
        where = f"at step {step} of {STEPS}"
        if isinstance(height, bool) or not isinstance(height, int | float):
            raise ProtocolError(f"must return a number, got {_describe(height)} {where}")
        if not 0 <= height < math.inf:
            raise ProtocolError(f"must return a finite factor of at least 0, got {height} {where}")


def check_optimizer(build: Any, used: UsedExtension, config: Any) -> None:
    """Take two steps with an optimizer on a tiny model, and look at its state."""
    optim = replace(value_at(config, used.option.rpartition(".")[0]), lr=0.01, lr_factors={})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = build(model, parameter_groups(model, optim.lr, {}, used.option), optim)
    if not isinstance(optimizer, Optimizer):
        raise ProtocolError(f"must return a torch.optim.Optimizer, got {_describe(optimizer)}")
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, param in model.named_parameters() if id(param) not in held]
    if missing:
        raise ProtocolError(f"must hold every parameter of the groups, and lacks {missing}")
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    for (name, param), old in zip(model.named_parameters(), before, strict=True):
        if not param.isfinite().all():
            raise ProtocolError(f"must keep parameters finite, and {name} is not after two steps")
        if param.equal(old):
            raise ProtocolError(f"must change every parameter, and {name} is the same after two steps")
        _check_state(name, param, optimizer.state[param])


def check_engine(engine: Any, _used: UsedExtension, _config: Any) -> None:
    """Look at the methods of an engine, which is built only in the workers."""
    _check_call(engine, (None, None), "the section `worker.rollout` and an EngineSetup")
    if isinstance(engine, type):
        names = [name for name, value in vars(RolloutEngine).items() if inspect.isfunction(value)]
        missing = [name for name in names if not name.startswith("_") and not hasattr(engine, name)]
        if missing:
            raise ProtocolError(f"must have the methods {missing}")


def check_logger(kind: Any, used: UsedExtension, _config: Any) -> None:
    """Look at the methods of a logger, which opens its files or its service only in the run."""
    if not (isinstance(kind, type) and issubclass(kind, Logger)):
        raise ProtocolError(f"must be a class derived from Logger, got {_describe(kind)}")
    if kind.module:
        importlib.import_module(kind.module)
    _check_call(kind, (None,), "a Run")
    for name, method in vars(Logger).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments = list(inspect.signature(method).parameters)
            _check_call(getattr(kind, name), tuple(arguments), f"{arguments}", name)


def check_dataset(kind: Any, _used: UsedExtension, config: Any) -> None:
    """Render and collate the first row."""
    built_in: type[RowDataset] = RLHFDataset if hasattr(config.worker, "rollout") else SFTDataset
    if not (isinstance(kind, type) and issubclass(kind, built_in)):
        name = f"{built_in.__module__}.{built_in.__name__}"
        raise ProtocolError(f"must be a class derived from {name}, got {_describe(kind)}")
    dataset = _open_first_rows(kind, config)
    item = None if dataset is None else dataset[0]
    if dataset is None or item is None or isinstance(item, BadRow):
        return  # opening the data lists the bad rows, and files that are missing
    missing = [name for name in kind.tensors if not isinstance(item.get(name), Tensor)]
    if missing:
        raise ProtocolError(f"must make items with the tensors {list(kind.tensors)}, and lacks {missing}")
    try:
        DataProto.from_single_dict(dataset.collate([item])).check()
    except BatchError as error:
        raise ProtocolError(f"must make batches of the key table: {error}") from error


def check_family(family: Any, used: UsedExtension, _config: Any) -> None:
    """Compute positions of a short prompt without media."""
    if not isinstance(family, Family):
        raise ProtocolError(f"must be a Family, got {_describe(family)}")
    register_family(used.spec)
    if not isinstance(family, VisionFamily):
        return
    vision = SimpleNamespace(spatial_merge_size=2)
    config = SimpleNamespace(image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN, vision_config=vision)
    positions = family.positions(config, torch.arange(LENGTH), MediaShape())
    if positions is None:
        return
    rows = family.position_rows
    _check_tensor("the position ids", positions, (rows, LENGTH) if rows > 1 else (LENGTH,), torch.int64)


def check_tool(_tool: Any, used: UsedExtension, config: Any) -> None:
    """Load the run's tools as the engines do, all at once: their names must differ."""
    if used != next(one for one in extensions_in(config) if one.kind == used.kind):
        return
    try:
        load_tools(config.worker.rollout.multi_turn)
    except ValueError as error:
        raise ProtocolError(f"is not usable: {error}") from error


def check_environment(_environment: Any, _used: UsedExtension, config: Any) -> None:
    """Load the run's environment as the engines do, without making one: rows may give arguments."""
    try:
        load_environments(config.worker.rollout.multi_turn)
    except ValueError as error:
        raise ProtocolError(f"is not usable: {error}") from error


def check_agent(agent: Any, used: UsedExtension, config: Any) -> None:
    """Check that a function takes a row, the policy and `agent_kwargs`."""
    try:
        inspect.signature(agent).bind({}, object(), **config.worker.rollout.multi_turn.agent_kwargs)
    except TypeError as error:
        raise ProtocolError(f"cannot be called so: {error}") from error


# The names of these are files only, or shipped ones that need no check.
TOOLS: Registry[Any] = Registry("worker.rollout.multi_turn.tools")
ENVIRONMENTS: Registry[Any] = Registry("worker.rollout.multi_turn.environment")
AGENTS: Registry[Any] = Registry("worker.rollout.multi_turn.agent")
KINDS: dict[str, Kind] = {
    "advantage estimator": Kind(
        ADV_ESTIMATORS, "a function of AdvantageInputs that returns Advantages", check_estimator
    ),
    "policy loss": Kind(
        POLICY_LOSSES, "a function of PolicyLossInputs that returns a PolicyLoss", check_loss
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


def _open_first_rows(kind: type[RowDataset], config: Any) -> RowDataset | None:
    """Open the rows of a run without checking them; None if the model's files cannot be read."""
    data = config.data
    frames = getattr(config.worker, "rollout", data)  # the section that limits video frames
    try:
        media = media_options(data, frames)
        readers = load_readers(config.worker.actor.model, data.override_chat_template, media, None)
    except (OSError, ValueError):
        return None
    reserved: dict[str, Any] = {"reserved": BATCH_KEYS} if issubclass(kind, RLHFDataset) else {}
    return open_unchecked(kind, data, readers, **reserved)


def _tiny_batch(algorithm: AlgorithmConfig, responses: int) -> DataProto:
    """Two prompts with `responses` responses each, and the inputs that the estimator declares."""
    size, needs = 2 * responses, algorithm.needs
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[-1, -1] = 0
    scores = torch.cat([torch.arange(responses).float(), torch.ones(responses)])  # (B,)
    rewards = torch.zeros(size, LENGTH)
    rewards[:, 1] = scores
    tensors = {"token_level_rewards": rewards, "loss_mask": mask, "old_log_probs": -rewards - 0.5}
    optional = {
        "values": {"values": rewards / 2},
        "sum_squared_probs": {"sum_squared_probs": torch.full((size, LENGTH), 0.5)},
        "reward_baselines": {"reward_baselines": scores / 2},
        "reward_components": {
            "reward_components": scores[:, None].repeat(1, len(algorithm.gdpo_reward_keys))
        },
        "process_rewards": {"process_rewards": rewards / 2, "accuracies": (scores > 0).float()},
    }
    for name, added in optional.items():
        tensors |= added if name in needs else {}
    uids = np.array([f"prompt {row // responses}" for row in range(size)], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uids})


def _check_tensor(name: str, value: Any, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    if not isinstance(value, Tensor):
        raise ProtocolError(f"must return a tensor for `{name}`, got {_describe(value)}")
    if tuple(value.shape) != tuple(shape):
        raise ProtocolError(f"must return `{name}` of shape {tuple(shape)}, got {tuple(value.shape)}")
    if dtype is not None and value.dtype != dtype:
        raise ProtocolError(f"must return `{name}` of type {dtype}, got {value.dtype}")
    if not value.isfinite().all():
        raise ProtocolError(f"must return finite numbers for `{name}`, got {value.tolist()}")


def _check_gradient(name: str, result: Tensor, inputs: Tensor) -> None:
    if not result.requires_grad:
        raise ProtocolError(f"must return `{name}` with a gradient, and it has none: is it detached?")
    (gradient,) = torch.autograd.grad(result.sum(), inputs, allow_unused=True)
    if gradient is None or not gradient.any():
        raise ProtocolError(f"must return `{name}` with a gradient, and that of the log-probs is 0")
    if not gradient.isfinite().all():
        raise ProtocolError(f"must have a finite gradient, got {gradient.tolist()}")


def _check_selection(choose: TokenSelection, inputs: dict[str, Tensor]) -> Tensor:
    """Select among the response tokens of a tiny batch, and return the selection (B, R)."""
    keep = inputs["response_mask"].bool()  # (B, R)
    row_ids, positions = keep.nonzero().unbind(-1)  # (N,), (N,)
    names = ("log_probs", "old_log_probs", "advantages")
    tokens = [inputs[name].detach()[keep] for name in names]
    chosen = choose(SelectionInputs(*tokens, row_ids=row_ids, positions=positions, seed=0))
    _check_tensor("the selected tokens", chosen, (int(keep.sum()),), torch.bool)
    return torch.zeros_like(keep).masked_scatter(keep, chosen)


def _check_state(name: str, param: Tensor, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor):
            fits = value.ndim == 0 or value.shape == param.shape or value.shape[0] == param.shape[0]
        else:
            fits = isinstance(value, int | float)
        if not fits:
            raise ProtocolError(
                "must keep state of a parameter's shape, with as many rows, or a number, so that it can be"
                f" saved and sharded; `{key}` of {name} {tuple(param.shape)} is {_describe(value)}"
            )


def _check_call(function: Any, arguments: tuple[Any, ...], what: str, name: str = "") -> None:
    if not callable(function):
        raise ProtocolError(f"must be a function or a class, got {_describe(function)}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        method = f"method `{name}` " if name else ""
        raise ProtocolError(f"{method}must take {what}: {error}") from error


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
