# SPDX-License-Identifier: Apache-2.0
"""Silence warnings of other packages that mean nothing but would come from every process of a run."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


def quiet_packages() -> None:
    quiet_torch()
    quiet_torchao()
    quiet_vllm()
    # Opening a file draws a bar that is full at once. A download of the hub has its own.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def quiet_torch() -> None:
    # Divided experts are gathered over their two axes, one after the other, as torch shards them.
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_not_of_two_gathers)


def quiet_torchao() -> None:
    # transformers and peft import torchao wherever it is installed. It warns of each of its libraries
    # that does not fit the machine, though nothing here uses them, and torch of how it registers two types.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_of_an_enum)
    # diffusers looks for tensors that torchao has elsewhere by now, and says so wherever it is imported.
    logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)


def quiet_vllm() -> None:
    # Every process would say that a build for CPU has no Triton, which is so on every machine without a GPU.
    logging.getLogger("vllm.triton_utils.importing").addFilter(_is_not_of_cpus)


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


def _is_not_of_cpus(record: logging.LogRecord) -> bool:
    return "doesn't include CPU backend" not in record.getMessage()


def _is_not_of_an_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()


def _is_not_of_two_gathers(record: logging.LogRecord) -> bool:
    return "sequential all_gather operations" not in record.getMessage()
