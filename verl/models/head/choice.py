# SPDX-License-Identifier: Apache-2.0
"""Choice of the head's softmax for a device."""

import importlib.util
from functools import cache

from verl.distributed.device import has_kernels
from verl.models.head.eager_softmax import EagerSoftmax
from verl.models.head.interface import HeadSoftmax
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


@cache  # so that a missing package is reported once
def softmax_for(device_type: str) -> HeadSoftmax:
    """Return the Triton kernels on GPUs and torch operations on CPUs."""
    if not has_kernels(device_type):
        return EagerSoftmax()
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "the softmax of the LM head runs several times slower than in its kernels, which need `triton`:"
            " CUDA builds of torch come with it, repair the installation with `pip install triton`"
        )
        return EagerSoftmax()
    from verl.models.head.triton_softmax import TritonSoftmax  # noqa: PLC0415 - CPUs need no triton

    return TritonSoftmax()
