# SPDX-License-Identifier: Apache-2.0
"""Silence warnings of other packages that mean nothing but would come from every process of a run."""

import logging


def quiet_torchao() -> None:
    # transformers and peft import torchao wherever it is installed. It warns of each of its libraries
    # that does not fit the machine, though nothing here uses them, and torch of how it registers two types.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_of_an_enum)


def _is_not_of_an_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
