# SPDX-License-Identifier: Apache-2.0
"""Checks of what trains, on two tiny prompts or responses, or a tiny model.

These are estimators, losses, terms of a loss, forward observers, schedules, optimizers and model families.
"""

import math
from collections.abc import Collection
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.algorithms.advantages import Advantages
from verl.algorithms.policy_loss_types import PolicyLossOptions
from verl.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from verl.algorithms.token_selection import SelectionInputs, TokenSelection, selection_of
from verl.batch_keys import BATCH_KEYS, BatchKey
from verl.config.algorithm import AlgorithmConfig
from verl.config.schema import value_at
from verl.models.families.interface import Family, MediaShape
from verl.models.families.registry import register_family
from verl.models.fused_log_probs import TokenLogProbs
from verl.optim.build import parameter_groups
from verl.optim.schedules import Position
from verl.protocol import DataProto, objects
from verl.trainer.core_algos import advantage_inputs
from verl.trainer.extensions.protocol import ProtocolError, UsedExtension, check_tensor, described
from verl.workers.packing.observers import OBSERVERS, ForwardObserver
from verl.workers.roles.loss_terms import BUILT_IN, LOSS_TERMS, LossTerm, TokenLoss

LENGTH = 3  # tokens of a tiny prompt or response
SIZES = {"B": 2, "R": LENGTH}  # of the columns of a loss term; any other dimension has 4
DTYPES = {"float32": torch.float32, "int32": torch.int32}
STEPS, WARMUP = 20, 2  # of the run that a schedule is called for
IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = 90, 91, 92  # of a tiny model


def check_estimator(estimator: Any, _used: UsedExtension, config: Any) -> None:
    """Call an estimator for two prompts: one has responses of different scores, one of equal scores."""
    algorithm: AlgorithmConfig = config.algorithm
    batch = _tiny_batch(algorithm, responses=min(config.worker.rollout.n, 4))
    result = estimator(advantage_inputs(batch, algorithm))
    if not isinstance(result, tuple) or len(result) != len(Advantages._fields):
        raise ProtocolError(f"must return Advantages(advantages, returns), got {described(result)}")
    for name, values in zip(Advantages._fields, result, strict=True):
        check_tensor(name, values, batch.batch["loss_mask"].shape)


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
        raise ProtocolError(f"must return a PolicyLoss, got {described(result)}")
    check_tensor("per_token", result.per_token, mask.shape)
    for name, values in result.statistics.items():
        check_tensor(f"statistics[{name!r}]", values, mask.shape)
        if values.requires_grad:
            raise ProtocolError(f"must detach `statistics[{name!r}]`, which carries a gradient")
    check_gradient("per_token", result.per_token, log_probs)


def check_kl(estimator: Any, _used: UsedExtension, config: Any) -> None:
    """Call a KL estimator for log-ratios of both signs, and for equal policies."""
    log_ratio = torch.tensor([[0.0, 0.5, -0.5], [2.0, -2.0, 0.0]], requires_grad=True)
    result = estimator(log_ratio)
    check_tensor("the KL", result, log_ratio.shape)
    zeros = result[log_ratio == 0]
    if zeros.abs().max() > 1e-6:
        raise ProtocolError(f"must be 0 for a log-ratio of 0, as padding has, got {zeros.tolist()}")
    if config.algorithm.use_kl_loss:
        check_gradient("the KL", result, log_ratio)


def check_term(term: Any, used: UsedExtension, config: Any) -> None:
    """Call a term on tiny log-probs and columns, and follow its gradient."""
    if not isinstance(term, LossTerm):
        raise ProtocolError(f"must be a LossTerm, got {described(term)}")
    names = [LOSS_TERMS[spec].name for spec in value_at(config, used.option)]
    if term.name in BUILT_IN or names.count(term.name) > 1:
        raise ProtocolError(f"must have a name that no other term has, got {term.name!r}")
    if "kl" in term.needs and not config.algorithm.use_reference:
        raise ProtocolError("needs `kl`, and the run has no reference: set `algorithm.disable_kl=false`")
    if "divergence" in term.needs:
        raise ProtocolError("must not need `divergence`, which belongs to the term of `distillation`")
    specs = value_at(config, "worker.actor.observers")
    columns = _tiny_columns(term, {name for spec in specs for name in OBSERVERS[spec].columns})
    log_probs = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2]], requires_grad=True)
    results = {"entropy": -2 * log_probs, "kl": log_probs.square(), "sum_squared_probs": log_probs.exp()}
    needed = {name: values for name, values in results.items() if name in term.needs}
    found = term.per_token(TokenLogProbs(log_probs, **needed), columns)
    if not isinstance(found, TokenLoss):
        raise ProtocolError(f"must return a TokenLoss, got {described(found)}")
    shape = columns["loss_mask"].shape
    check_tensor("per_token", found.per_token, shape)
    for name, (values, mask) in found.means.items():
        check_tensor(f"means[{name!r}]", values, shape)
        check_tensor(f"the mask of means[{name!r}]", mask, shape)
    if term.mask is not None:
        check_tensor("mask", term.mask(columns), shape)
    check_gradient("per_token", found.per_token, log_probs)


def check_observer(observer: Any, used: UsedExtension, config: Any) -> None:
    """Check the class of an observer, which only a model can call."""
    if not isinstance(observer, type) or not issubclass(observer, ForwardObserver):
        raise ProtocolError(f"must be a class derived from ForwardObserver, got {described(observer)}")
    if isinstance(observer.columns, str):
        raise ProtocolError(f"must have a list of names as `columns`, got {observer.columns!r}")
    specs = value_at(config, used.option)
    names = [*BATCH_KEYS, *(name for spec in specs for name in OBSERVERS[spec].columns)]
    taken = sorted(name for name in observer.columns if names.count(name) > 1)
    if taken:
        raise ProtocolError(f"must leave columns with names that nothing else has, got {taken}")


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
        "values": rewards / 2,
        "sum_squared_probs": torch.full((size, LENGTH), 0.5),
        "reward_baselines": scores / 2,
        "reward_components": scores[:, None].repeat(1, len(algorithm.gdpo_reward_keys)),
        "process_rewards": rewards / 2,
    }
    tensors |= {name: values for name, values in optional.items() if name in needs}
    if "process_rewards" in needs:
        tensors["accuracies"] = (scores > 0).float()
    uids = objects(f"prompt {row // responses}" for row in range(size))
    return DataProto.from_dict(tensors, {"uid": uids})


def check_gradient(name: str, result: Tensor, inputs: Tensor) -> None:
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
    check_tensor("the selected tokens", chosen, (int(keep.sum()),), torch.bool)
    return torch.zeros_like(keep).masked_scatter(keep, chosen)


def _tiny_columns(term: LossTerm, observed: Collection[str]) -> dict[str, Tensor]:
    # ones where a column is a mask, else small numbers
    columns = {"loss_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    known = {name: key for name, key in BATCH_KEYS.items() if key.kind != "object"}
    known |= {name: BatchKey(name, "B R", "float32", "observer", "term") for name in observed}
    for name in term.needs:
        if name in TokenLogProbs._fields or name in columns:
            continue
        if name not in known:
            raise ProtocolError(
                f"needs {name!r}, which is none of {[*TokenLogProbs._fields, *sorted(known)]}"
            )
        shape = [SIZES.get(size, 4) for size in known[name].dims[0]]
        ones = torch.ones(shape, dtype=DTYPES.get(known[name].kind, torch.int64))
        columns[name] = ones / 2 if known[name].kind == "float32" else ones
    return columns


def check_schedule(schedule: Any, used: UsedExtension, config: Any) -> None:
    """Call a schedule for each step after the warm-up of a short run."""
    optim = value_at(config, used.option.rpartition(".")[0])
    for step in range(WARMUP, STEPS + 1):
        height = schedule(Position(step, WARMUP, STEPS), optim)
        where = f"at step {step} of {STEPS}"
        if isinstance(height, bool) or not isinstance(height, int | float):
            raise ProtocolError(f"must return a number, got {described(height)} {where}")
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
        raise ProtocolError(f"must return a torch.optim.Optimizer, got {described(optimizer)}")
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


def check_family(family: Any, used: UsedExtension, _config: Any) -> None:
    """Compute positions of a short prompt without media."""
    if not isinstance(family, Family):
        raise ProtocolError(f"must be a Family, got {described(family)}")
    register_family(used.spec)
    vision = SimpleNamespace(spatial_merge_size=2)
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "audio_token_id": AUDIO_TOKEN}
    config = SimpleNamespace(**tokens, vision_config=vision)
    positions = family.positions(config, torch.arange(LENGTH), MediaShape())
    if positions is None:
        return
    rows = family.position_rows
    check_tensor("the position ids", positions, (rows, LENGTH) if rows > 1 else (LENGTH,), torch.int64)


def _check_state(name: str, param: Tensor, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor):
            fits = value.ndim == 0 or value.shape == param.shape or value.shape[0] == param.shape[0]
        else:
            fits = isinstance(value, int | float)
        if not fits:
            raise ProtocolError(
                "must keep state of a parameter's shape, with as many rows, or a number, so that it can be"
                f" saved and sharded; `{key}` of {name} {tuple(param.shape)} is {described(value)}"
            )
