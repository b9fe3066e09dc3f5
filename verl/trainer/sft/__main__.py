# SPDX-License-Identifier: Apache-2.0
"""`python3 -m verl.trainer.sft`; `command.py` holds it, since child processes cannot import this module."""

import sys

from verl.trainer.sft.command import main

if __name__ == "__main__":
    sys.exit(main())
