# SPDX-License-Identifier: Apache-2.0
"""Make questions with reasoning from long videos: `examples/verl_longvideo`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl_longvideo.command import main

if __name__ == "__main__":
    sys.exit(main())
