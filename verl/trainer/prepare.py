# SPDX-License-Identifier: Apache-2.0
"""Preparation of a run: exports checkpoints it starts from, checks its models and finds its devices."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from verl.checkpoint.legacy_shards import find_shard_files
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import HUGGINGFACE
from verl.config.model import ModelConfig
from verl.config.trainer import RunTree
from verl.distributed.device import resolve_device
from verl.planning.model_sizes import check_trained
from verl.planning.planned_run import PlannedRun
from verl.planning.report import Describe, resolve_auto_sizes
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.trainer.run.cluster_join import join_cluster
from verl.utils.rank_logger import get_logger
from verl.viewer.process import viewer_process

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # an export writes one of them last

C = TypeVar("C", bound=RunTree)

logger = get_logger(__name__)


@contextmanager
def prepared_run(
    config: C,
    describe: Describe[C],
    wait_s: float = 0.0,
    viewer_port: int | None = None,
    check: Callable[[C], None] | None = None,
) -> Iterator[tuple[C, ResourcePool]]:
    """Check everything that needs no devices, then join the cluster; leaving disconnects from it.

    Args:
        describe: `planned_ppo` or `planned_sft`.
        wait_s: Seconds to wait for a cluster that is too small or unreachable.
        check: Raises for what it finds wrong with the run.

    Yields:
        The config, with numbers instead of `auto` and for the devices that were found; the devices.
    """
    with ExitStack() as stack:
        if viewer_port is not None:
            videos = [Path(one) for one in {config.data.image_dir, config.data.video_dir} if one is not None]
            folder = Path(config.trainer.checkpoint_folder)
            stack.enter_context(viewer_process(folder, viewer_port, videos))
        run = describe(config)
        export_checkpoints(planned.model for planned in run.models)
        device = resolve_device(config.trainer.device)
        check_trained_models(run)
        if check is not None:
            check(config)
        config, pool = join_cluster(config, device, wait_s, stack)
        # After joining: with `trainer.elastic` there may be fewer devices, and sizes depend on them.
        yield resolve_auto_sizes(config, describe, device), pool


def check_trained_models(run: PlannedRun) -> None:
    """Log the trained parameters of each model; raise `ValueError` if a pattern matches nothing."""
    for planned in run.models:
        if planned.optim is not None:
            shape = check_trained(planned.model, planned.optim, planned.role, planned.head)
            logger.info("%s: %s", planned.role, shape.trained_text)


def export_checkpoints(models: Iterable[ModelConfig]) -> None:
    """Write the weights of every checkpoint that a model of the run starts from, once."""
    for model in models:
        folder = Path(model.model_path or "")
        if is_unexported(folder):
            logger.info("exporting a checkpoint: path=%s", folder)
            merge_checkpoint(folder.parent, trust_remote_code=model.trust_remote_code)


def is_unexported(folder: Path) -> bool:
    """Return whether a folder is the `huggingface` of a checkpoint, without its weights."""
    if folder.name != HUGGINGFACE or any((folder / name).is_file() for name in WEIGHTS):
        return False
    return (folder.parent / MANIFEST).is_file() or bool(find_shard_files(folder.parent))
