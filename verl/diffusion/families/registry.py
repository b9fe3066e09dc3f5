# SPDX-License-Identifier: Apache-2.0
"""All families of diffusion models, the folder of a model, and the family of a folder."""

import json
from pathlib import Path

from verl.config.files.model_files import PIPELINE
from verl.config.model import ModelConfig
from verl.diffusion.families.interface import DiffusionFamily
from verl.diffusion.families.pipelines import SD3, Flux, QwenImage, Wan

OPTION = "`worker.actor.model.model_path`"
FAMILIES: tuple[DiffusionFamily, ...] = (SD3(), Flux(), QwenImage(), Wan())


def family_of(folder: Path) -> DiffusionFamily:
    """Return the family of a diffusers folder.

    Raises:
        ValueError: It is not such a folder, or its pipeline has no family.
    """
    index = folder / PIPELINE
    if not index.is_file():
        raise ValueError(
            f"{OPTION} ({folder}) must be a folder of diffusers with a {PIPELINE}, which it lacks"
        )
    name = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    known = {pipeline: family for family in FAMILIES for pipeline in family.pipelines}
    if name not in known:
        raise ValueError(f"{OPTION} ({folder}) is a {name}, must be one of {sorted(known)}")
    return known[name]


def downloaded(model: ModelConfig) -> Path:
    """Return the folder of a model; of one of the hub, whatever of it a pipeline needs is downloaded.

    Raises:
        ValueError: It is neither a folder nor a pipeline of the hub that can be reached.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline  # noqa: PLC0415 - local folders do without

    name = str(model.model_path)
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(DiffusionPipeline.download(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{OPTION} ({name}) is neither a folder nor a pipeline of the hub that can be reached: {error}"
        ) from error
