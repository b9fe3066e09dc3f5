# SPDX-License-Identifier: Apache-2.0
"""Whether a Ray cluster lets this machine join, found within seconds.

Ray itself tries for minutes, with messages of its own, and cannot be interrupted: so a process of its own
tries first, and is given up.
"""

import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

CONNECT_S = 5.0  # for the first packet of the address
ANSWER_S = 25.0  # for joining, which takes a second, or several where the head is busy
IMPORT_S = 120.0  # for importing Ray, from a cold network file system at worst
ENDPOINT = re.compile(r"(?:\w+://)?\[?(?P<host>.+?)\]?:(?P<port>\d+)")
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # of a job that was submitted: the driver is this process, not its probe
NO_TOKEN = ("InvalidAuthToken", "find an authentication token", "no authentication token")
PROBE = """
import logging, sys
import ray
print("imported", flush=True)
ray.init(sys.argv[1], include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
"""


class Attempt(NamedTuple):
    """How a process that tried to join ended.

    Attributes:
        status: Its exit status; None of one that was given up.
        told: What it and Ray said after the import.
    """

    status: int | None
    told: str


def why_unreachable(address: str) -> str | None:
    """What was seen of a cluster that does not let this machine join, and what to do; None if it does.

    Takes a second if it does, and CONNECT_S + ANSWER_S at most if not.

    Args:
        address: As `RAY_ADDRESS` has it; of `auto` the first part, the network, is not asked.
    """
    endpoint = ENDPOINT.fullmatch(address)
    if endpoint is not None:
        try:
            socket.create_connection((endpoint["host"], int(endpoint["port"])), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            return f"nothing answers there ({error}): it is gone, or its port cannot be reached from here"
    attempt = _try_to_join(address)
    if any(mark in attempt.told for mark in NO_TOKEN):
        return f"it asks for its token, {_how_to_show_the_token()}"
    if attempt.status is None:
        last_words = attempt.told.rstrip().rpartition("\n")[2]
        return (
            f"something listens there but let nobody join within {ANSWER_S:g} s"
            f"{last_words and f' ({last_words})'}: this machine is no node of it (`ray start --address=...`"
            " joins one), it is too busy, or another program has the port"
        )
    return None if attempt.status == 0 else attempt.told.rstrip().rpartition("\n")[2]


def _try_to_join(address: str) -> Attempt:
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


def _listen(process: subprocess.Popen[bytes]) -> Attempt:
    """Read what the process says until it ends, is late, or has said enough."""
    assert process.stdout is not None, "it is a pipe"
    said, is_imported, deadline = "", False, time.monotonic() + IMPORT_S
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
        said += chunk
        if not chunk:
            return Attempt(process.wait(), said)
        if any(mark in said for mark in NO_TOKEN):
            break
        if not is_imported and "imported\n" in said:
            said, is_imported, deadline = said.partition("imported\n")[2], True, time.monotonic() + ANSWER_S
    return Attempt(None, said)


def _how_to_show_the_token() -> str:
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = "RAY_AUTH_TOKEN" in os.environ or file.is_file()
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        state = "and this machine has another one" if has_token else f"and there is none in {file}"
        return f"{state}: copy that of the machine that ran `ray start --head` to {file}"
    remedy = "" if has_token else f", with a copy of its token in {file}"
    return f"which this process does not show: `export RAY_AUTH_MODE=token`{remedy}"
