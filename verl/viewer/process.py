# SPDX-License-Identifier: Apache-2.0
"""The viewer beside a run: a process of its own, which ends with the one that started it.

The page of 100,000 rollouts takes no time from the training: another process reads and sorts them. It reads
its standard input: a line with the token, which arguments would show to every account of the machine, then
until the end, which comes when its parent closes it or dies.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.utils.rank_logger import get_logger
from verl.viewer.runs import RunFolder
from verl.viewer.server import address_of, loopback_socket, new_token, serve

END_S = 10.0  # for answers that are under way

logger = get_logger(__name__)


@contextmanager
def viewer_process(run_folder: Path, port: int) -> Iterator[str]:
    """Show a run while the block runs.

    Args:
        run_folder: Of the run; nothing needs to be in it yet.
        port: Of 127.0.0.1; 0 takes a free one.

    Yields:
        The address, which is also logged.

    Raises:
        ValueError: The port cannot be had.
    """
    try:
        listening = loopback_socket(port)
    except OSError as error:
        raise ValueError(
            f"`trainer.viewer_port` ({port}) cannot be had: {error.strerror}; 0 takes a free port"
        ) from error
    with listening:
        token = new_token()
        address, handle = address_of(listening, token), listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.viewer.process", str(handle), str(run_folder)],
            stdin=subprocess.PIPE,
            pass_fds=[handle],
            start_new_session=True,  # Ctrl-C is for the run, which ends the viewer when it is saved
        )
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # it died at once: the run goes on without
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
    logger.info("the run can be watched: address=%s", address)
    try:
        yield address
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: list[str]) -> None:
    """Serve one run on a socket that was opened by the parent."""
    handle, folder = arguments
    run = RunFolder(Path(folder), Path(folder).name)
    token = sys.stdin.buffer.readline().decode().strip()
    serve([run], socket.socket(fileno=int(handle)), token, until=sys.stdin.buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
