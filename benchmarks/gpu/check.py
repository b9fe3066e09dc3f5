# SPDX-License-Identifier: Apache-2.0
"""Run the parts of `scripts/gpu_check.sh`, each in a process of its own, and write what they find."""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.gpu.parts import CALL_S, PARTS, PATIENCE, Part, chosen_parts
from benchmarks.gpu.report import read_report
from verl.distributed.gpus import list_gpus
from verl.utils.text_table import table

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = (
    *("torch", "triton", "transformers", "vllm", "flash-attn", "flash-attn-3", "flashinfer-python"),
    *("torchao", "ray", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"),
)
GRACE_S = 15  # for a part that is stopped to end its own processes
TINY_PATIENCE = 4  # the CPU may be shared
HASHER = "VLLM_MM_HASHER_ALGORITHM"


@dataclass
class Result:
    """The outcome of a part: PASS, FAIL (a law is broken), ERROR, TIMEOUT or SKIPPED."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    laws: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def find_versions() -> dict[str, str]:
    return {name: found for name in VERSIONS if (found := find_version(name))}


def find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def missing_packages() -> list[str]:
    """Requirements of the project that are not installed at all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line).name for line in project["dependencies"]]
    return [
        name for name in (*needed, "vllm", "pytest") if find_version(name) is None and not is_cpu_vllm(name)
    ]


def is_cpu_vllm(name: str) -> bool:
    return name == "vllm" and importlib.util.find_spec("vllm") is not None


def describe_machine() -> dict[str, Any]:
    gpus = list_gpus()
    return {
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": ", ".join(gpu.name for gpu in gpus) or f"CPU, {len(os.sched_getaffinity(0))} cores",
        "driver": gpus[0].driver if gpus else None,
        "python": platform.python_version(),
        "versions": find_versions(),
        "not_installed": missing_packages(),
    }


def choose_hasher() -> tuple[dict[str, str], str]:
    """The hash by which vLLM names images if the default's package is missing, and a line for the log."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None or importlib.util.find_spec("blake3") is not None:
        return {}, ""
    if HASHER in Path(vllm.origin).with_name("envs.py").read_text():
        return {HASHER: "sha256"}, f"blake3 is not installed: {HASHER}=sha256"
    return {}, f"blake3 is not installed, and this vLLM does not know {HASHER}: images in the engine fail"


def run(part: Part, options: argparse.Namespace, models: Path, log: Path, limit_s: float) -> Result:
    """Run a part with its output in the log; a part that is too slow is ended with its children."""
    hasher, note = choose_hasher()
    environment = os.environ | hasher | {"PYTHONPATH": path_with_root(), "PYTHONUNBUFFERED": "1"}
    started = time.perf_counter()
    with log.open("a+") as file:
        file.write(f"\n==== {part.name}\n{note}\n")
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            part.command(options, models), cwd=ROOT, env=environment, stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        in_time = wait(process, limit_s)
        seconds = time.perf_counter() - started
        file.seek(start)
        output = file.read()
    outcome = read_report(output)
    result = Result(part.name, "PASS", seconds, laws=outcome.laws, figures=outcome.figures)
    if not in_time:
        result.status, result.reason = "TIMEOUT", f"more than {limit_s:.0f} s"
    elif broken := [law["law"] for law in outcome.laws if not law["passed"]]:
        result.status, result.reason = "FAIL", "; ".join(broken)
    elif outcome.missing:
        result.status, result.reason = "SKIPPED", f"not installed: {', '.join(outcome.missing)}"
    elif process.returncode and outcome.laws:
        result.status, result.reason = "ERROR", f"exit status {process.returncode} after its last law"
    elif process.returncode:
        result.status, result.reason = "ERROR", f"exit status {process.returncode}: {last_line(output)}"
    elif not outcome.laws:
        result.status, result.reason = "SKIPPED", f"checks nothing here: {last_line(output)}"
    return result


def path_with_root() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def wait(process: subprocess.Popen, limit_s: float) -> bool:
    """Wait for a process; at the limit end it and its session."""
    for how, patience in ((None, limit_s), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if how is not None:
            os.killpg(process.pid, how)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        return how is None
    raise RuntimeError(f"process {process.pid} cannot be ended")


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def show(machine: dict[str, Any], results: Sequence[Result]) -> str:
    """The table, and a line for each part that did not pass."""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    lines = [f"{machine['device']}{driver}; Python {machine['python']}, {versions}; {machine['time']}"]
    if machine["not_installed"]:
        lines.append(f"not installed: {', '.join(machine['not_installed'])}")
    rows: list[Sequence[object]] = [("part", "status", "seconds", "laws", "figures")]
    for result in results:
        held = sum(law["passed"] for law in result.laws)
        headline = next(part.headline for part in PARTS if part.name == result.name)
        figures = [f"{name} {short(result.figures[name])}" for name in headline if name in result.figures]
        laws = f"{held} of {len(result.laws)}" if result.laws else "-"
        rows.append((result.name, result.status, f"{result.seconds:.0f}", laws, ", ".join(figures) or "-"))
    reasons = [f"{result.name}: {result.status}: {result.reason}" for result in results if result.reason]
    return "\n".join([*lines, "", table(rows, indent=""), *reasons]) + "\n"


def short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def read_earlier(folder: Path, machine: dict[str, Any]) -> dict[str, Result]:
    """Results in the folder, by part, if they are of this device and these versions of packages, or fewer."""
    file = folder / "gpu_check.json"
    if not file.exists():
        return {}
    record = json.loads(file.read_text())
    is_same = all(record[key] == machine[key] for key in ("device", "driver", "python"))
    if not is_same or record["versions"].items() - machine["versions"].items():
        return {}
    return {entry["name"]: Result(**entry) for entry in record["parts"]}


def write(folder: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """Replace the files, after each part, so that a run that is cut off leaves what it has."""
    record = machine | {"parts": [asdict(result) for result in results]}
    laws = [json.dumps({"part": result.name} | law) for result in results for law in result.laws]
    for name, text in (
        ("gpu_check.json", json.dumps(record, indent=1)),
        ("gpu_check.jsonl", "".join(f"{law}\n" for law in laws)),
        ("gpu_check.txt", show(machine, results)),
    ):
        new = folder / f"{name}.new"
        new.write_text(text)
        new.replace(folder / name)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="The first hour on a GPU.")
    parser.add_argument("--tiny", action="store_true", help="tiny problems on the CPU, to test the programs")
    chosen = parser.add_mutually_exclusive_group()
    names = ", ".join(part.name for part in PARTS)
    chosen.add_argument("--only", help=f"parts, separated by commas: {names}")
    calls = sorted({part.call for part in PARTS} - {0})
    chosen.add_argument(
        "--call", type=int, choices=calls, help=f"the parts of one of several calls of {CALL_S} seconds"
    )
    parser.add_argument("--budget", type=float, help="seconds for all parts together")
    parser.add_argument("--again", action="store_true", help="also run parts that have passed")
    parser.add_argument("--wheels", action="store_true", help="print the packages of the parts, for pip")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu_check"), help="folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    parts = chosen_parts(options.only, options.call)
    if options.wheels:
        print("\n".join(dict.fromkeys(name for part in parts for name in part.wheels)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    machine, started = describe_machine(), time.perf_counter()
    results = read_earlier(options.out, machine)
    patience = TINY_PATIENCE if options.tiny else 1
    budget = options.budget or (CALL_S * patience if options.call else float("inf"))
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as models:
        for part in parts:
            if part.name in results and results[part.name].status == "PASS" and not options.again:
                continue
            left = budget - (time.perf_counter() - started)
            if left < GRACE_S:
                results.setdefault(part.name, Result(part.name, "SKIPPED", reason="the budget is spent"))
            else:
                print(f"{part.name} ...", flush=True)
                limit_s = min(left, part.predicted_s * PATIENCE * patience)
                results[part.name] = run(part, options, Path(models), options.out / "gpu_check.log", limit_s)
            write(options.out, machine, in_order(results))
    print(show(machine, in_order(results)), end="")
    print(f"written: {options.out}/gpu_check.json, .jsonl, .txt, .log")
    return int(any(results[part.name].status in ("FAIL", "ERROR", "TIMEOUT") for part in parts))


def in_order(results: dict[str, Result]) -> list[Result]:
    return [results[part.name] for part in PARTS if part.name in results]


if __name__ == "__main__":
    sys.exit(main())
