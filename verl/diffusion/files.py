# SPDX-License-Identifier: Apache-2.0
"""The folder of a pipeline, downloaded if it is named by the hub."""

from pathlib import Path

from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from verl.config.model import ModelConfig


def downloaded(model: ModelConfig) -> Path:
    """Return the folder of a model; of one of the hub, whatever of it a pipeline needs is downloaded.

    Raises:
        ValueError: It is neither a folder nor a pipeline of the hub that can be reached.
    """
    name = str(model.model_path)
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(DiffusionPipeline.download(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`worker.actor.model.model_path` ({name}) is neither a folder nor a pipeline of the hub that can"
            f" be reached: {error}"
        ) from error
