# SPDX-License-Identifier: Apache-2.0
"""Transport of weights from training processes to engines in separate processes.

To add one: a class for each end here, and its name in `worker.rollout.weight_transport`.
"""

from functools import partial

import torch

from verl.config.rollout import DELTA, OBJECT_STORE, RolloutConfig
from verl.distributed.device import is_gpu
from verl.distributed.weights.delta import DeltaReader, DeltaServer
from verl.distributed.weights.server import WeightReader, WeightServer
from verl.single_controller.ray.published_weights import StoreReader, WeightStore, own_address
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__, all_ranks=True)


# The end of a rank that trains: `publish` offers its share of full tensors, and returns what readers need.
Publisher = WeightServer | WeightStore
# The end of a rank of an engine: `named_tensors` yields a version from what all ranks that train returned.
Reader = WeightReader | StoreReader


def make_publisher(config: RolloutConfig, rank: int, world_size: int, device: torch.device) -> Publisher:
    way = config.weights_go_by(is_gpu(device))
    if way == OBJECT_STORE:
        return WeightStore(rank, world_size)
    server = DeltaServer if way == DELTA else WeightServer
    on_lost = partial(logger.warning, "an engine is lost while it takes weights: %s")
    return server(rank, world_size, device, own_address(), on_lost=on_lost)


def make_reader(config: RolloutConfig, rank: int, world_size: int, device: torch.device) -> Reader:
    way = config.weights_go_by(is_gpu(device))
    if way == OBJECT_STORE:
        return StoreReader()
    reader = DeltaReader if way == DELTA else WeightReader
    return reader(rank, world_size, device, own_address())
