# SPDX-License-Identifier: Apache-2.0
"""Look at runs in a browser: curves, rollouts, images, scores and log-probs of tokens.

    python3 scripts/rollout_viewer.py checkpoints/math/first checkpoints/math/second

A folder is a run or holds some. The page answers this machine only; from another one, forward the port first:
`ssh -L 8901:127.0.0.1:8901 HOST`.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl.viewer.runs import open_runs
from verl.viewer.server import address_of, loopback_socket, serve

PORT = 8901


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="rollout_viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder of runs")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"of 127.0.0.1 (default {PORT}); 0 takes a free one"
    )
    options = parser.parse_args(arguments)
    try:
        runs = open_runs(options.folders)
        listening = loopback_socket(options.port)
    except (ValueError, OSError, OverflowError) as error:
        parser.exit(1, f"rollout_viewer: {error}\n")
    sys.stdout.write(f"{len(runs)} runs at {address_of(listening)} (Ctrl-C ends)\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):  # how it is ended
        serve(runs, listening)
