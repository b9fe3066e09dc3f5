# SPDX-License-Identifier: Apache-2.0
r"""Run the steps of the Dockerfile in order without Docker, in a folder with a Debian root.

    debootstrap --variant=minbase --include=python3-dev,python3-venv,ca-certificates bookworm /tmp/root
    python3 scripts/run_dockerfile.py /tmp/root --arg EXTRA=cpu --arg PACKAGES=torch==2.13.0 \
        --arg PIP_EXTRA_INDEX_URL=INDEX  # of the PyTorch project's CPU wheels

The folder is used instead of the base image, and a virtual environment of its Python instead of the image's.
Everything after FROM is done as Docker does it: RUN in the root with the build arguments as variables, COPY
from the repository. Then `--help` of the command, `pip list` and the doctor run inside. Needs to run as root.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
KNOWN = ("FROM", "ARG", "RUN", "WORKDIR", "COPY", "CMD")
VENV = "/opt/python"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CHECKS = (
    "python -m verl.trainer.main --help > /dev/null",
    "pip list | grep -Ei '^(torch|vllm|transformers|ray|easy-verl)[^a-z]'",
    "verl-doctor --quick || test $? = 1",  # 1: a check found something, which it prints
)


class Step(NamedTuple):
    """An instruction: `Step("WORKDIR", "/opt/verl")`."""

    instruction: str
    rest: str


def read_steps(text: str) -> list[Step]:
    """Parse a Dockerfile: comments dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    steps = [Step(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    unknown = sorted({step.instruction for step in steps} - set(KNOWN))
    if unknown:
        raise SystemExit(f"Dockerfile: {unknown} are not known here: add them to scripts/run_dockerfile.py")
    return steps


def argument_of(step: Step, given: Mapping[str, str]) -> tuple[str, str]:
    """Name and value of an ARG: the given one, or its default."""
    name, _, default = step.rest.partition("=")
    return name, given.get(name, "".join(shlex.split(default)) if default else "")


def copy(rest: str, root: Path, folder: str) -> None:
    """Copy files, and the contents of folders, as COPY does."""
    *sources, target = rest.split()
    place = root / (Path(folder) / target).relative_to("/")
    for source in (REPOSITORY / name for name in sources):
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def run_inside(
    command: str, root: Path, folder: str, variables: Mapping[str, str], binds: Sequence[str]
) -> None:
    """Run a shell command in the root, in a mount namespace of its own; its failure ends the program."""
    mounts = [f"mount --bind {path} {root}{path}" for path in ("/proc", "/sys", "/dev", "/dev/shm", *binds)]
    for path in ("/proc", "/sys", "/dev", "/dev/shm", *binds):
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    shutil.copy2("/etc/resolv.conf", root / "etc" / "resolv.conf")
    inner = f"cd {shlex.quote(folder)} && {command}"
    script = " && ".join([*mounts, f"exec chroot {root} /bin/sh -c {shlex.quote(inner)}"])
    unshare = ["unshare", "--mount", "--propagation", "private"]
    passed = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "HTTP"))}
    environment = {**passed, "HOME": "/root", "PATH": f"{VENV}/bin:{SYSTEM_PATH}", **variables}
    if not environment.get("PIP_EXTRA_INDEX_URL"):
        environment.pop("PIP_EXTRA_INDEX_URL", None)
    finished = subprocess.run([*unshare, "sh", "-c", script], env=environment)
    if finished.returncode:
        raise SystemExit(f"run_dockerfile: exit status {finished.returncode} of {command}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, help="folder with a Debian root, which is changed")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="build argument")
    parser.add_argument("--bind", action="append", default=[], help="folder of this machine to show inside")
    options = parser.parse_args()
    root, given = options.root.resolve(), dict(pair.split("=", 1) for pair in options.arg)
    variables: dict[str, str] = {}
    folder = "/"
    run_inside(f"python3 -m venv {VENV}", root, folder, {}, options.bind)
    for step in read_steps((REPOSITORY / "Dockerfile").read_text()):
        started = time.perf_counter()
        if step.instruction == "ARG":
            name, value = argument_of(step, given)
            variables[name] = value
        elif step.instruction == "WORKDIR":
            folder = step.rest
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.instruction == "COPY":
            copy(step.rest, root, folder)
        elif step.instruction == "RUN":
            run_inside(step.rest, root, folder, variables, options.bind)
        status = (
            "skipped" if step.instruction in ("FROM", "CMD") else f"{time.perf_counter() - started:.0f} s"
        )
        print(f"{status:>8}  {step.instruction} {step.rest}", flush=True)
    for command in CHECKS:
        run_inside(command, root, folder, variables, options.bind)
        print(f"{'':>8}  {command}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
