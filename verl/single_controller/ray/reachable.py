# SPDX-License-Identifier: Apache-2.0
"""Probe of a Ray cluster: can this machine join it?"""

import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

CONNECT_S = 5.0  # for the TCP connection
ANSWER_S = 25.0  # for joining: a second, or several if the head is busy
IMPORT_S = 120.0  # for importing Ray, at worst from a cold network file system
ENDPOINT = re.compile(r"(?:\w+://)?\[?(?P<host>.+?)\]?:(?P<port>\d+)")
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a submitted job, whose driver is this process, not the probe
NO_TOKEN = ("InvalidAuthToken", "find an authentication token", "no authentication token")
PROBE = """
import logging, sys
import ray
print("imported", flush=True)
ray.init(sys.argv[1], include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
"""


class Attempt(NamedTuple):
    """Result of a process that tried to join."""

    status: int | None  # exit status; None if it was killed
    output: str  # its own and Ray's, after the import


def why_unreachable(address: str) -> str | None:
    """Return why a cluster does not let this machine join and what to do; None if it does.

    Takes about a second for a good cluster, CONNECT_S + ANSWER_S at most. `address` is as in `RAY_ADDRESS`;
    for `auto` the network check is skipped.
    """
    endpoint = ENDPOINT.fullmatch(address)
    if endpoint is not None:
        try:
            socket.create_connection((endpoint["host"], int(endpoint["port"])), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            return f"nothing answers there ({error}): it is down, or its port is not reachable from here"
    attempt = _try_to_join(address)
    if any(mark in attempt.output for mark in NO_TOKEN):
        return f"it requires a token, {_token_remedy()}"
    if attempt.status is None:
        last_words = attempt.output.rstrip().rpartition("\n")[2]
        return (
            f"something listens there but did not let this machine join within {ANSWER_S:g} s"
            f"{last_words and f' ({last_words})'}: this machine is not a node of it (join with"
            " `ray start --address=...`), it is too busy, or another program uses the port"
        )
    return None if attempt.status == 0 else attempt.output.rstrip().rpartition("\n")[2]


def _try_to_join(address: str) -> Attempt:
    # Ray retries for minutes and cannot be interrupted, so another process tries and is killed if too slow.
    environment = {name: value for name, value in os.environ.items() if name != JOB}
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    ) as process:
        try:
            return _listen(process)
        finally:
            process.kill()


def _listen(process: subprocess.Popen) -> Attempt:
    """Read the process's output until it ends, times out or asks for a token."""
    assert process.stdout is not None, "it is a pipe"
    output, is_imported, deadline = "", False, time.monotonic() + IMPORT_S
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
        output += chunk
        if not chunk:
            return Attempt(process.wait(), output)
        if any(mark in output for mark in NO_TOKEN):
            break
        if not is_imported and "imported\n" in output:
            output, is_imported = output.partition("imported\n")[2], True
            deadline = time.monotonic() + ANSWER_S
    return Attempt(None, output)


def _token_remedy() -> str:
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = "RAY_AUTH_TOKEN" in os.environ or file.is_file()
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        state = "and this machine has a different one" if has_token else f"and there is none in {file}"
        return f"{state}: copy it from the machine that ran `ray start --head` to {file}"
    remedy = "" if has_token else f", with a copy of the token in {file}"
    return f"which this process does not send: `export RAY_AUTH_MODE=token`{remedy}"
