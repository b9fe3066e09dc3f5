# SPDX-License-Identifier: Apache-2.0
"""Check this machine before a run: versions, devices, memory, disks, Ray, network, sandbox.

    python3 scripts/diagnose.py                        # what any run needs
    python3 scripts/diagnose.py config=run.yaml        # what this one does
    python3 scripts/diagnose.py --json                 # for programs

Each line is OK, WARN (some runs do not work, or not well) or FAIL (no run works), with a remedy. Nothing is
started or changed; on several nodes, run it on each of them.

Exit status: 0; 1 where something is FAIL; 2 for a config that cannot be used.
"""

import json
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from verl.cli import diagnosis
from verl.cli.device_diagnosis import check_gpus, check_imports
from verl.cli.diagnosis import Finding, Level
from verl.config.ppo import PPOConfig
from verl.config.renamed_keys import VERL_KEYS
from verl.config.schema import ConfigError, load_config
from verl.distributed.gpus import list_gpus
from verl.trainer.command import make_parser
from verl.trainer.run.exit_status import BAD_INPUT, FAILED
from verl.utils.version_check import VLLM_PACKAGES, check_versions, find_version

CONNECT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = make_parser("diagnose", __doc__)
    parser.add_argument("--json", action="store_true", help="a list of objects in place of lines")
    parser.add_argument("--quick", action="store_true", help="do not try to import the heavy packages")
    switches = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(PPOConfig, switches.options, VERL_KEYS) if switches.options else None
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    findings = []
    for finding in diagnose(config, tries_imports=not switches.quick):
        findings.append(finding)
        if not switches.json:
            sys.stdout.write(_line(finding))
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if switches.json:
        sys.stdout.write(json.dumps([finding._asdict() for finding in findings], indent=2) + "\n")
    else:
        sys.stdout.write(", ".join(f"{count} {level}" for level, count in counts.items()) + "\n")
    return FAILED if counts[Level.FAIL] else 0


def _line(finding: Finding) -> str:
    remedy = f"      remedy: {finding.remedy}\n" if finding.remedy else ""
    return f"{finding.level:4}  {finding.name:17} {finding.found}\n{remedy}"


def diagnose(config: PPOConfig | None, *, tries_imports: bool) -> Iterator[Finding]:
    """Yield the finding of each check as it is made.

    Args:
        config: Of the run; None asks for what any run needs.
        tries_imports: Import the heavy packages, in a process of its own: some ten seconds.
    """
    yield check_supported("vllm" if config is None else config.worker.rollout.name)
    yield diagnosis.check_requirements()
    yield diagnosis.check_engines()
    if tries_imports:
        yield check_imports()
    device, num_gpus = (
        ("auto", 0) if config is None else (config.trainer.device, config.trainer.n_gpus_per_node)
    )
    yield from check_gpus(list_gpus(), device, num_gpus)
    yield diagnosis.check_threads()
    yield diagnosis.check_memory()
    yield diagnosis.check_shared_memory()
    yield diagnosis.check_disk(Path("checkpoints" if config is None else config.trainer.checkpoint_folder))
    yield diagnosis.check_temporary_folder()
    yield diagnosis.check_open_files()
    yield diagnosis.check_loopback()
    yield diagnosis.check_host_name(1 if config is None else config.trainer.nnodes)
    yield check_ray()
    yield diagnosis.check_sandbox()


def check_supported(engine: str) -> Finding:
    """Whether Python, torch, vLLM, torchvision and transformers are versions that go together."""
    names = ("torch", "torchvision", "transformers", "ray")
    versions = {name: find_version(name) for name in names} | {"vllm": find_version(*VLLM_PACKAGES)}
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    found = f"Python {platform.python_version()}, {found}"
    try:
        check_versions(engine)
    except RuntimeError as error:
        return Finding("versions", Level.FAIL, found, str(error).replace("\n  - ", " "))
    return Finding("versions", Level.OK, found)


def check_ray() -> Finding:
    """Whether the cluster that a run would join answers; a run that finds none starts its own."""
    try:
        from verl.single_controller.ray.cluster import started_cluster  # noqa: PLC0415 - without Ray, a finding
    except ImportError as error:
        return Finding("ray", Level.FAIL, str(error), "pip install 'ray>=2.50,<3'")
    origin = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "`ray start`"
    address = os.environ.get("RAY_ADDRESS") or started_cluster()
    if address in (None, "local"):
        return Finding("ray", Level.OK, "no cluster is started here: a run starts its own")
    if address == "auto":
        address = started_cluster() or "auto"
    found = f"{address}, from {origin}"
    remedy = "start the cluster again, or run `ray stop` and unset RAY_ADDRESS"
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((parts.hostname, parts.port or 0), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        return Finding("ray", Level.FAIL, f"{found}: {error}", remedy)
    return Finding("ray", Level.OK, f"{found} answers")
