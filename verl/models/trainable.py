# SPDX-License-Identifier: Apache-2.0
"""Selection of the trained parameters of a model."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.config.model import ModelConfig
from verl.models.families.interface import Sense, is_part
from verl.models.families.registry import family_of
from verl.models.layer_configs import experts_per_layer
from verl.models.lora import adapted_parameters, attach_adapters, compile_pattern
from verl.models.lora_weights import AdapterConfig, is_adapter, plain_name
from verl.models.mixture.routing import is_router_alone, routers_of
from verl.models.scalar_head import SCORE
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


def frozen_senses(options: ModelConfig) -> set[Sense]:
    """Return the encoders that are not trained."""
    frozen: dict[Sense, bool] = {"vision": options.freeze_vision_tower, "audio": options.freeze_audio_tower}
    return {sense for sense, is_frozen in frozen.items() if is_frozen}


def select_trainable(
    model: nn.Module, options: ModelConfig, option: str, adapter: AdapterConfig | None = None
) -> None:
    """Freeze and adapt a model in place, so that `requires_grad` marks the trained parameters.

    Args:
        options: Names the modules that are trained or frozen; what is frozen has no adapters either.
        option: The config section of `options`, for errors.
        adapter: Train LoRA, and of the other parameters those of `train_modules` only.
    """
    frozen: list[str] = []
    if isinstance(model, PreTrainedModel):  # the transformer of a diffusion model has neither
        frozen = [*_frozen_encoders(model, options, option), *_frozen_routers(model, options, option)]
    names = list(dict(model.named_parameters()))
    trained = set(_matching(names, options.train_modules, f"{option}.train_modules"))
    if adapter is None:
        trained = trained or set(names)
    else:
        attach_adapters(model, adapter, f"{option}.lora", frozen)
        names = list(dict(model.named_parameters()))  # with adapters
        trained = {name for name in names if is_adapter(name) or name in trained | _moved(model, trained)}
    # A value model's score starts without useful values: it is trained unless it is frozen by name.
    trained |= {name for name in names if name.startswith(f"{SCORE}.")}
    trained -= set(_matching(names, options.freeze_modules, f"{option}.freeze_modules"))
    trained -= {name for name in trained if is_part(name, frozen)}
    if not trained:
        raise ValueError(
            f"`{option}.freeze_modules` ({options.freeze_modules}) leaves nothing to train: freeze less"
        )
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
        # With LoRA everything trained is float32.
        if adapter is not None and (name in trained or is_adapter(name)):
            param.data = param.data.to(torch.float32)


def _frozen_encoders(model: PreTrainedModel, options: ModelConfig, option: str) -> list[str]:
    encoders, frozen = family_of(model.config).encoders, frozen_senses(options)
    for sense in frozen - encoders.keys():
        text, name = "`%s.freeze_%s_tower` has no effect: %s has no %s tower", type(model).__name__
        logger.warning(text, option, sense, name, sense)
    return [part for sense, parts in encoders.items() if sense in frozen for part in parts]


def _frozen_routers(model: PreTrainedModel, options: ModelConfig, option: str) -> list[str]:
    routers, name = routers_of(model), type(model).__name__
    if options.router_aux_loss_coef > 0 and not routers:
        raise ValueError(
            f"`{option}.router_aux_loss_coef` needs a mixture of experts whose router logits transformers"
            f" records, which {name} is not: leave it at 0"
        )
    if not options.freeze_router:
        return []
    if not routers and experts_per_layer(model.config.get_text_config()):
        raise ValueError(
            f"`{option}.freeze_router` finds no router in {name}, as this version of transformers records no"
            f" router logits there: name the routers in `{option}.freeze_modules`, or update transformers"
        )
    if not routers:
        logger.warning("`%s.freeze_router` has no effect: %s has no router", option, name)
    for router in routers:
        if not is_router_alone(router.module):
            raise ValueError(
                f"`{option}.freeze_router` would freeze more than the router in {router.name}: name the"
                f" router's parameters in `{option}.freeze_modules`"
            )
    return [router.name for router in routers]


def _moved(model: nn.Module, trained: set[str]) -> set[str]:
    # trained tensors next to adapted ones, whose modules were wrapped
    adapted = {each.name for each in adapted_parameters(model)}
    holders = {name.rpartition(".")[0] for name in adapted}
    plain = {plain_name(name): name for name, _ in model.named_parameters()}
    return {plain[name] for name in trained - adapted if name.rpartition(".")[0] in holders}


def _matching(names: list[str], patterns: Sequence[str], option: str) -> list[str]:
    found = []
    for pattern in patterns:
        regex = compile_pattern(pattern, option)
        matches = [name for name in names if regex.search(name)]
        if not matches:
            raise ValueError(
                f"`{option}` ({pattern}) matches no parameter's name; an example of a name is {names[0]}"
            )
        found += matches
    return found
