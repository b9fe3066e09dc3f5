# SPDX-License-Identifier: Apache-2.0
"""Make questions with reasoning from long videos: `verl/cli/longvideo_reason.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.longvideo_reason import main

if __name__ == "__main__":
    sys.exit(main())
