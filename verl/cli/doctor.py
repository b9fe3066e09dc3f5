# SPDX-License-Identifier: Apache-2.0
"""Check this machine before a run: versions, devices, memory, disks, Ray, network, sandbox.

    verl-doctor                        # for any run
    verl-doctor config=run.yaml        # for this run
    verl-doctor --json                 # for programs
    verl-doctor --repair               # let plain transformers work where only torchvision is a CUDA build

Each line is OK, WARN (some runs do not work, or not well) or FAIL (no run works), with a remedy. Nothing is
started or changed, except by `--repair`. With several nodes, run it on each of them.

Exit status: 0; 1 if a check is FAIL; 2 for a config that cannot be used.
"""

# To add a check, write a function that returns a `Finding` and call it in `run_checks`.

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from verl.cli import checks
from verl.cli.checks import Finding, Level, judge
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError
from verl.config.trainer import RunConfig
from verl.distributed.gpus import list_gpus
from verl.planning.device_defaults import load_run_config
from verl.trainer.command import make_parser
from verl.trainer.run.exit_status import FAILED, told
from verl.utils.cuda_builds import REMEDY, is_broken, repair_cuda_builds, repair_environment
from verl.utils.version_check import (
    ENGINE_PACKAGES,
    NAME,
    check_versions,
    find_version,
    matches,
    name_clash,
)

IMPORTS = ("torch", "transformers", "ray")
IMPORT_TIMEOUT_S = 300
PLAIN_CODE = "from transformers import AutoProcessor, LlamaForCausalLM"
REPAIR = "from verl.utils.cuda_builds import repair_cuda_builds; repair_cuda_builds()"
IMPORT_CODE = f"""
{REPAIR}
import sys
for name in sys.argv[1:]:
    print(name, flush=True)
    __import__(name)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    repair_cuda_builds()
    parser = make_parser("verl-doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
    parser.add_argument("--quick", action="store_true", help="do not try to import the heavy packages")
    parser.add_argument("--repair", action="store_true", help="repair this environment, and check nothing")
    switches = parser.parse_intermixed_args(arguments)
    if switches.repair:
        sys.stdout.write("repaired\n" if repair_environment() else "nothing to repair\n")
        return 0
    try:
        config = load_run_config(PPOConfig, switches.options) if switches.options else None
    except ConfigError as error:
        return told(error)
    engine, trainer = (default_engine(), None) if config is None else (config.engine, config.trainer)
    findings = []
    for finding in run_checks(engine, trainer, tries_imports=not switches.quick):
        findings.append(finding)
        if not switches.json:
            remedy = f"      remedy: {finding.remedy}\n" if finding.remedy else ""
            sys.stdout.write(f"{finding.level:4}  {finding.name:17} {finding.found}\n{remedy}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if switches.json:
        sys.stdout.write(json.dumps([finding._asdict() for finding in findings], indent=2) + "\n")
    else:
        sys.stdout.write(", ".join(f"{count} {level}" for level, count in counts.items()) + "\n")
    return FAILED if counts[Level.FAIL] else 0


def run_checks(engine: str, trainer: RunConfig | None, *, tries_imports: bool) -> Iterator[Finding]:
    """Yield the finding of each check as it is made; without `trainer`, for any run."""
    yield check_supported(engine)
    yield check_requirements()
    yield check_name()
    yield check_engines()
    if tries_imports:
        yield check_imports([*IMPORTS, *([engine] if engine in ENGINE_PACKAGES else [])])
        yield check_plain_transformers()
    device, num_gpus = ("auto", 0) if trainer is None else (trainer.device, trainer.n_gpus_per_node)
    gpus = list_gpus()
    yield from checks.check_gpus(gpus, device, num_gpus)
    if gpus and device != "cpu":
        yield checks.check_fabric()
        yield checks.check_compiler()
        yield checks.check_attention_packages()
    yield checks.check_threads()
    yield checks.check_memory()
    yield checks.check_shared_memory()
    yield checks.check_disk(Path("checkpoints" if trainer is None else trainer.checkpoint_folder))
    yield checks.check_temporary_folder()
    yield checks.check_open_files()
    yield checks.check_loopback()
    yield checks.check_host_name(1 if trainer is None else trainer.nnodes)
    yield checks.check_ray()
    yield checks.check_sandbox()


def default_engine() -> str:
    """Return the rollout engine that is installed: vLLM unless only another one is."""
    return next((name for name, packages in ENGINE_PACKAGES.items() if find_version(*packages)), "vllm")


def check_supported(engine: str) -> Finding:
    """Check that Python, torch, the engine, torchvision and transformers are supported together."""
    names = ("torch", "torchvision", "transformers", "ray")
    versions = {name: find_version(name) for name in names}
    if engine in ENGINE_PACKAGES:
        versions[engine] = find_version(*ENGINE_PACKAGES[engine])
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    found = f"Python {platform.python_version()}, {found}"
    try:
        check_versions(engine)
    except RuntimeError as error:
        return Finding("versions", Level.FAIL, found, str(error).replace("\n  - ", " "))
    return Finding("versions", Level.OK, found)


def check_requirements() -> Finding:
    try:
        needed = [Requirement(text) for text in requires(NAME) or ()]
    except PackageNotFoundError:
        remedy = "pip install -e '.[cpu]' or '.[gpu]' in the folder of the repository"
        return Finding("packages", Level.WARN, f"{NAME} is not installed", remedy)
    needed = [need for need in needed if need.marker is None]  # requirements of extras have one
    wrong = [need for need in needed if not matches(find_version(need.name), str(need.specifier))]
    names = " ".join(f"'{need.name}{need.specifier}'" for need in wrong)
    missing = ", ".join(f"{need.name} {find_version(need.name) or 'is missing'}" for need in wrong)
    found = missing or f"{len(needed)} requirements are met"
    return judge("packages", found, f"pip install {names}", fails=wrong)


def check_name() -> Finding:
    """Check that no other distribution is imported as `verl`."""
    found, _, remedy = (name_clash() or f"{NAME} alone provides `verl`").partition(": ")
    return judge("package name", found, remedy, warns=remedy)


def check_engines() -> Finding:
    """Check that there is a rollout engine, and vLLM once: its two packages overwrite each other's files."""
    packages = [name for names in ENGINE_PACKAGES.values() for name in names]
    installed = {name: found for name in packages if (found := find_version(name))}
    clashing = [name for name in ENGINE_PACKAGES["vllm"] if name in installed]
    if len(clashing) > 1:
        remedy = f"pip uninstall -y {' '.join(clashing)}, then install the one for this machine"
        return Finding("engines", Level.FAIL, f"{' and '.join(clashing)} write the same files", remedy)
    remedy = f"pip install '{NAME}[cpu]' or '{NAME}[gpu]'; without it only `worker.rollout.name=hf` works"
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    return judge("engines", found or "not installed", remedy, warns=not installed)


def check_imports(modules: Sequence[str]) -> Finding:
    """Import the heavy packages in a separate process, which takes some ten seconds."""
    command = [sys.executable, "-c", IMPORT_CODE, *modules]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        found = f"no answer within {IMPORT_TIMEOUT_S} s"
        return Finding("imports", Level.FAIL, found, "check the disk that holds the environment")
    if tried.returncode == 0:
        return Finding("imports", Level.OK, ", ".join(modules))
    begun = [line for line in tried.stdout.splitlines() if line in modules]
    reason = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    remedy = f"python3 -c '{REPAIR}; import {begun[-1] if begun else 'torch'}' shows the whole error"
    return Finding("imports", Level.FAIL, f"{begun[-1] if begun else 'verl'}: {reason}", remedy)


def check_plain_transformers() -> Finding:
    """Check that a program without this package can load an exported model, in a separate process."""
    name = "plain transformers"
    if not is_broken("torchvision"):
        return Finding(name, Level.OK, "torch and torchvision were built for the same devices")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    tried = subprocess.run([sys.executable, "-c", PLAIN_CODE], env=environment, capture_output=True)
    state = "broken" if tried.returncode else "repaired"
    found = f"torchvision was built for CUDA and torch for CPUs: {state}"
    return judge(name, found, REMEDY, warns=tried.returncode)
