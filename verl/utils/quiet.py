# SPDX-License-Identifier: Apache-2.0
"""Warnings of other packages that say nothing about a run, and would come from every process of it."""

import logging


def quiet_torchao() -> None:
    """Let torchao, which transformers and peft import wherever it is installed, be imported silently.

    It warns of each of its compiled libraries that does not fit the machine, though nothing here uses them,
    and torch warns of how torchao registers two of its types. Acts on loggers alone, before either package is
    there.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_of_an_enum)


def _is_not_of_an_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
