# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are trained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from verl.models.adapter_files import AdapterConfig
from verl.models.lora import attach_adapters, compiled
from verl.models.lora_weights import is_adapter
from verl.models.registry import model_type_of
from verl.models.scalar_head import SCORE
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainableOptions:
    """What is to be trained.

    Attributes:
        adapter: Train low-rank adapters, and what `train` names beside; None trains weights.
        train: Patterns of parameters to train; without adapters, empty trains all.
        freeze: Patterns of parameters that stay as they are; they win.
        freeze_vision_tower: The vision tower stays as it is, and is not adapted.
    """

    adapter: AdapterConfig | None = None
    train: Sequence[str] = ()
    freeze: Sequence[str] = ()
    freeze_vision_tower: bool = False


def select_trainable(model: PreTrainedModel, options: TrainableOptions, option: str) -> None:
    """Freeze and adapt a model; its parameters say by `requires_grad` which of them are trained.

    A pattern is a regular expression, found anywhere in a parameter's name. The score of a value model has no
    first value worth keeping: it is trained unless it is frozen by name. Adapters, and what is trained beside
    them, are float32.

    Args:
        model: With memory or on the meta device; changed in place.
        options: What is to be trained.
        option: Where the model stands in the config, for errors.

    Raises:
        ValueError: A pattern is no regular expression or matches nothing, or nothing is left to train.
    """
    tower = model_type_of(model.config).vision_tower
    if options.freeze_vision_tower and tower is None:
        logger.warning(
            "`%s.freeze_vision_tower` has no effect: %s has no vision tower", option, type(model).__name__
        )
    frozen = [tower] if options.freeze_vision_tower and tower is not None else []
    names = [name for name, _ in model.named_parameters()]
    trained = set(_matching(names, options.train, f"{option}.train_modules"))
    if options.adapter is None:
        trained = trained or set(names)
    else:
        attach_adapters(model, options.adapter, f"{option}.lora", frozen)
        trained = {name for name, _ in model.named_parameters() if is_adapter(name) or name in trained}
    trained |= {name for name, _ in model.named_parameters() if name.startswith(f"{SCORE}.")}
    trained -= set(
        _matching([name for name, _ in model.named_parameters()], options.freeze, f"{option}.freeze_modules")
    )
    trained -= {name for name in trained if name.startswith(tuple(f"{module}." for module in frozen))}
    if not trained:
        raise ValueError(
            f"`{option}.freeze_modules` ({list(options.freeze)}) leaves nothing to train: name less"
        )
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
        if options.adapter is not None and (name in trained or is_adapter(name)):
            param.data = param.data.to(torch.float32)


def _matching(names: Iterable[str], patterns: Sequence[str], option: str) -> list[str]:
    """The names in which one of the patterns is found; each pattern must be found in one."""
    names, found = list(names), []
    for pattern in patterns:
        regex = compiled(pattern, option)
        matches = [name for name in names if regex.search(name)]
        if not matches:
            raise ValueError(
                f"`{option}` ({pattern}) is found in no parameter's name; they are such as {names[0]}"
            )
        found += matches
    return found
