# SPDX-License-Identifier: Apache-2.0
"""View runs in a browser: curves, rollouts, images, scores and log-probs of tokens.

    verl-view checkpoints/math/first checkpoints/math/second

Each folder is a run or contains runs. The page is served to this machine only; from another one, forward the
port first: `ssh -L 8901:127.0.0.1:8901 HOST`. Without a browser, `--text` prints a summary and `--watch`
refreshes it.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console

from verl.utils.rank_logger import get_logger
from verl.utils.typed_command import command_parser
from verl.viewer.runs import RunFolder, open_runs
from verl.viewer.server import address_of, loopback_socket, make_app, new_token, serve
from verl.viewer.summary import show

PORT = 8901
REFRESH_S = 5.0  # for `--watch`
END_S = 10.0  # for pending responses

logger = get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C, or print a summary."""
    parser = command_parser("verl-view", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, or a folder of runs")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"port on 127.0.0.1 (default {PORT}); 0 picks a free one"
    )
    parser.add_argument(
        "--videos", type=Path, action="append", default=[], metavar="DIR",
        help="folder with videos and audio that the page may play; repeatable",
    )  # fmt: skip
    parser.add_argument("--text", action="store_true", help="print a summary instead of serving a page")
    parser.add_argument("--read-only", action="store_true", help="notes cannot be changed on the page")
    parser.add_argument("--watch", action="store_true", help=f"refresh it every {REFRESH_S:g} seconds")
    options = parser.parse_args(arguments)
    try:
        runs = open_runs(options.folders)
        if options.text or options.watch:
            _print_summary(runs, is_watched=options.watch)
            return
        listening = _open_port(options.port)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    token = new_token()
    sys.stdout.write(f"{len(runs)} runs at {address_of(listening, token)} (press Ctrl-C to stop)\n")
    sys.stdout.flush()
    app = make_app(runs, token, video_folders=options.videos, is_read_only=options.read_only)
    with suppress(KeyboardInterrupt):
        serve(app, listening)


def _open_port(port: int) -> socket.socket:
    try:
        return loopback_socket(port)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else f"{error}"
        raise ValueError(f"port {port} is not available ({reason}): `--port=0` picks a free one") from error


@contextmanager
def viewer_process(run_folder: Path, port: int, video_folders: Sequence[Path] = ()) -> Iterator[str]:
    """Serve a run from a separate process while the block runs; yield the address, which is also logged.

    The run's folder may still be empty. Port 0 picks a free one. The page plays videos of `video_folders`.

    Raises:
        ValueError: The port is not available.
    """
    # A separate process, so that reading and sorting 100,000 rollouts takes no time from training. It reads
    # its standard input: a line with the token, which other accounts could see among arguments, then until
    # the end, which comes when its parent closes the pipe or dies.
    try:
        listening = loopback_socket(port)
    except OSError as error:
        raise ValueError(
            f"`trainer.viewer_port` ({port}) is not available: {error.strerror}; 0 picks a free port"
        ) from error
    with listening:
        token = new_token()
        address, handle = address_of(listening, token), listening.fileno()
        folders = map(str, [run_folder, *video_folders])
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.viewer.process", str(handle), *folders],
            stdin=subprocess.PIPE,
            pass_fds=[handle],
            start_new_session=True,  # Ctrl-C goes to the run, which ends the viewer after saving
        )
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # it died at once: the run continues without it
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
    logger.info("the run can be watched: address=%s", address)
    try:
        yield address
    finally:
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _print_summary(runs: Sequence[RunFolder], *, is_watched: bool) -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without block characters
    with suppress(KeyboardInterrupt, BrokenPipeError):  # a pipe may be closed early, as by `| head`
        show(runs, Console(highlight=False), REFRESH_S if is_watched else None)


if __name__ == "__main__":  # in the process that `viewer_process` started
    handle, folder = int(sys.argv[1]), Path(sys.argv[2])
    token = sys.stdin.buffer.readline().decode().strip()
    app = make_app([RunFolder(folder, folder.name)], token, video_folders=[Path(one) for one in sys.argv[3:]])
    serve(app, socket.socket(fileno=handle), until=sys.stdin.buffer)
