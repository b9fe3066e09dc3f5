# SPDX-License-Identifier: Apache-2.0
"""All families of diffusion models, and the one of a folder."""

import json
from pathlib import Path

from verl.config.files.model_files import PIPELINE
from verl.diffusion.families.flux import Flux
from verl.diffusion.families.interface import DiffusionFamily
from verl.diffusion.families.qwen_image import QwenImage
from verl.diffusion.families.sd3 import SD3
from verl.diffusion.families.wan import Wan

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
