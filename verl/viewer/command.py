# SPDX-License-Identifier: Apache-2.0
"""Look at runs in a browser: curves, rollouts, images, scores and log-probs of tokens.

    python3 scripts/rollout_viewer.py checkpoints/math/first checkpoints/math/second

A folder is a run or holds some. The page answers this machine only; from another one, forward the port first:
`ssh -L 8901:127.0.0.1:8901 HOST`. Or stay on the terminal: `--text` prints a summary, `--watch` renews it.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console

from verl.viewer.runs import RunFolder, open_runs
from verl.viewer.server import address_of, loopback_socket, new_token, serve
from verl.viewer.summary import show

PORT = 8901
REFRESH_S = 5.0  # of `--watch`


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C, or print a summary."""
    parser = argparse.ArgumentParser(
        prog="rollout_viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder of runs")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"of 127.0.0.1 (default {PORT}); 0 takes a free one"
    )
    parser.add_argument("--text", action="store_true", help="print a summary instead of serving a page")
    parser.add_argument("--watch", action="store_true", help=f"... and again every {REFRESH_S:g} seconds")
    options = parser.parse_args(arguments)
    try:
        runs = open_runs(options.folders)
        if options.text or options.watch:
            print_summary(runs, is_watched=options.watch)
            return
        listening = loopback_socket(options.port)
    except (ValueError, OSError, OverflowError) as error:
        parser.exit(1, f"rollout_viewer: {error}\n")
    token = new_token()
    sys.stdout.write(f"{len(runs)} runs at {address_of(listening, token)} (Ctrl-C ends)\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):  # how it is ended
        serve(runs, listening, token)


def print_summary(runs: Sequence[RunFolder], *, is_watched: bool) -> None:
    """Print what is known of the runs, once or until Ctrl-C; a pipe gets plain lines of 80 columns."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no blocks
    with suppress(KeyboardInterrupt, BrokenPipeError):  # `| head` ends it
        show(runs, Console(highlight=False), REFRESH_S if is_watched else None)
