# SPDX-License-Identifier: Apache-2.0
"""The sizes of the models that a worker will hold, from their configs alone; no weights are read."""

import torch
from transformers import PreTrainedModel

from verl.config.model import FSDPConfig, ModelConfig, OptimConfig
from verl.models.hub_names import meta_model
from verl.models.scalar_head import make_scalar
from verl.models.trainable import select_trainable
from verl.optim.build import parameter_groups
from verl.planning.memory_model import ModelShape
from verl.planning.model_shape import model_shape
from verl.workers.model_builder import load_model_config, trainable_options, weights_dtype


def read_shape(
    model: ModelConfig, fsdp: FSDPConfig, *, option: str, is_trained: bool, head: str = "causal"
) -> ModelShape:
    """Build a model without memory, as `build_model` does, and count.

    Args:
        model: Where its config is, and what of it is trained.
        fsdp: The type of its weights.
        option: Where `model` stands in the config, for errors.
        is_trained: It learns.
        head: "causal" or "scalar".

    Raises:
        FileNotFoundError: The folder has no config that can be read.
        ValueError: `override_config`, `lora` or the patterns of parameters do not fit the model.
    """
    options = trainable_options(model, option) if is_trained else None
    empty = _empty(model, option, head, weights_dtype(fsdp, options))
    if options is not None:
        select_trainable(empty, options, option)
    else:
        empty.requires_grad_(False)
    return model_shape(empty)


def check_trained(model: ModelConfig, optim: OptimConfig, role: str, head: str = "causal") -> ModelShape:
    """Find what is wrong with the choice of what is trained, and how, without weights and devices.

    Args:
        model: Of the role.
        optim: Of the role.
        role: Section below `worker`, for errors.
        head: "causal" or "scalar".

    Returns:
        The sizes of the model, and of what is trained of it.

    Raises:
        FileNotFoundError: The folder has no config that can be read.
        ValueError: A pattern matches nothing, an adapter cannot be used, or nothing is left to train.
    """
    option = f"worker.{role}.model"
    empty = _empty(model, option, head)
    select_trainable(empty, trainable_options(model, option), option)
    parameter_groups(empty, optim.lr, optim.lr_factors, f"worker.{role}.optim")
    return model_shape(empty)


def _empty(model: ModelConfig, option: str, head: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    config = load_model_config(model, option)
    if head == "scalar":
        make_scalar(config, has_bias=True)
    return meta_model(config, dtype, model.trust_remote_code)
