# SPDX-License-Identifier: Apache-2.0
"""Silence warnings of other packages that mean nothing but would come from every process of a run."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

ERRORS_ONLY = (
    # transformers and peft import torchao wherever it is installed. It warns of each of its libraries that
    # does not fit the machine, though nothing here uses them.
    "torchao",
    # It looks for tensors that torchao has elsewhere by now, and says so wherever it is imported.
    "diffusers.quantizers.torchao.torchao_quantizer",
)
LEFT_OUT = {  # messages with a text, by logger
    # Divided experts are gathered over their two axes, one after the other, as torch shards them.
    "torch.distributed.tensor._redistribute": "sequential all_gather operations",
    # How torchao registers two types.
    "torch.utils._pytree": "is an Enum subclass",
    # Every process would say so of a build for CPU, on every machine without a GPU.
    "vllm.triton_utils.importing": "doesn't include CPU backend",
}


def quiet_packages() -> None:
    for name in ERRORS_ONLY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, text in LEFT_OUT.items():
        logging.getLogger(name).addFilter(lambda record, text=text: text not in record.getMessage())
    # Opening a file draws a bar that is full at once. A download of the hub has its own.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def no_weight_bars() -> Iterator[None]:
    """Hide the bars that transformers draws while it reads or writes weights."""
    from transformers.utils import logging as bars  # noqa: PLC0415 - heavy

    were_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            bars.enable_progress_bar()
