# SPDX-License-Identifier: Apache-2.0
"""Check a run's models before it starts, and export the checkpoints it starts from."""

from collections.abc import Iterable
from pathlib import Path

from verl.checkpoint.legacy_shards import find_shard_files
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import HUGGINGFACE
from verl.config.files.model_files import has_weights
from verl.config.model import ModelConfig
from verl.config.rules.engine_rules import cpu_problem
from verl.distributed.device import is_gpu
from verl.planning.model_sizes import check_model
from verl.planning.planned_run import PlannedRun
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


def check_models(run: PlannedRun) -> None:
    """Log the trained parameters of each model.

    Raises:
        ValueError: A pattern matches nothing, or the experts cannot be divided as the options say.
    """
    for planned in run.models:
        shape = check_model(planned, run.lengths.ranks // run.ring)
        if shape is not None:
            logger.info("%s: %s", planned.role, shape.trained_text)


def check_quantized_engine(run: PlannedRun, device: str) -> None:
    """Raise `ValueError` if the engine is to be quantized on a device, `auto` resolved, other than a GPU."""
    if run.engine is not None and run.engine.is_quantized and not is_gpu(device):
        raise ValueError(cpu_problem(run.engine.options.quantization or ""))


def export_checkpoints(models: Iterable[ModelConfig]) -> None:
    """Write the weights of every checkpoint that a model of the run starts from, once."""
    for model in models:
        folder = Path(model.model_path or "")
        if is_unexported(folder):
            logger.info("exporting a checkpoint: path=%s", folder)
            merge_checkpoint(folder.parent, trust_remote_code=model.trust_remote_code)


def is_unexported(folder: Path) -> bool:
    """Return whether a folder is the `huggingface` of a checkpoint, without its weights."""
    if folder.name != HUGGINGFACE or has_weights(folder):
        return False
    return (folder.parent / MANIFEST).is_file() or bool(find_shard_files(folder.parent))
