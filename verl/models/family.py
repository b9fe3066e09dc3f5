# SPDX-License-Identifier: Apache-2.0
"""Model families of a user's files: types of models that `registry.py` and `position_ids.py` do not list.

A file may also register classes with transformers (`AutoConfig.register`); it is run before a model of the
run is read, in every process that reads one.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.models.position_ids import POSITION_IDS, PositionIds
from verl.models.registry import MODEL_TYPES, ModelType
from verl.utils.registry import Registry


@dataclass(frozen=True)
class ModelFamily:
    """Properties of a type of model.

    Example::

        family = ModelFamily("my_vl", ModelType("model", "model.visual", position_rows=4), qwen2_5_vl)
    """

    model_type: str  # of the model's config
    properties: ModelType = field(default_factory=ModelType)  # the default is a text model
    position_ids: PositionIds | None = None  # None counts from 0


FAMILIES: Registry[Any] = Registry("worker.actor.model.family")


def register_family(spec: str | None) -> ModelFamily | None:
    """Make the family `file.py:NAME` known to this process, and return it; None without one."""
    if spec is None:
        return None
    family = FAMILIES[spec]
    if not isinstance(family, ModelFamily):
        raise ValueError(f"`{FAMILIES.option}` ({spec}) must be a ModelFamily, got {type(family).__name__}")
    if MODEL_TYPES.get(family.model_type, family.properties) != family.properties:
        raise ValueError(
            f"`{FAMILIES.option}` ({spec}) must describe a new type of model, or {family.model_type} as it is"
            " known already"
        )
    MODEL_TYPES[family.model_type] = family.properties
    if family.position_ids is not None:
        POSITION_IDS[family.model_type] = family.position_ids
    return family
