# SPDX-License-Identifier: Apache-2.0
"""Run the parts of `scripts/gpu_check.sh`, each in a process of its own, and write a JSON file and a table.

To add a part, add an entry to `PARTS` whose program prints `Report` as its last line.
"""

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

from benchmarks.gpu.outcome import Outcome, read_report, read_tests, read_update
from verl.distributed.gpus import list_gpus
from verl.utils.text_table import table

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = (
    *("torch", "triton", "transformers", "vllm", "flash-attn", "flash-attn-3", "flashinfer-python"),
    *("torchao", "ray", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"),
)
GRACE_S = 15  # for a part that is stopped to end its own processes
TINY_PATIENCE = 4  # the CPU may be shared


@dataclass(frozen=True)
class Part:
    """One program."""

    name: str
    limit_s: int
    headline: tuple[str, ...] = ()  # figures in the table

    def command(self, options: argparse.Namespace, models: Path, results: Path) -> list[str]:
        kind, _, case = self.name.partition(".")
        device = ["--device", "cpu" if options.tiny else "cuda"]
        tiny = ["--tiny"] if options.tiny else []
        if kind == "tests":
            marker = "not gpu and not heavy" if options.tiny else "gpu"
            options_of_pytest = ["-q", "--continue-on-collection-errors", f"--junitxml={results}"]
            return [sys.executable, "-m", "pytest", "-m", marker, *options_of_pytest, "tests/gpu"]
        if kind == "update":
            return [sys.executable, "benchmarks/gpu_update.py", *device, *tiny]
        selected = ["--case", case] if case else []
        return [
            *(sys.executable, "-m", f"benchmarks.gpu.{kind}", "--models", str(models)),
            *(*device, *tiny, *selected),
        ]

    def read(self, output: str, results: Path) -> Outcome:
        if self.name == "tests":
            return read_tests(results)
        return read_update(output) if self.name == "update" else read_report(output)


ENGINE = ("log_probs_difference_mean", "sync_1_gb_per_s", "generate_tokens_per_s")
CASES = ("plain", "reserved", "head", "top_p", "lora", "moe")  # of `engine`
PARTS = (  # in order of value
    Part("kernels", 240, ("attention_grouped_heads_tflops", "head_update_s", "eager_head_update_s")),
    Part("memory", 240, ("load_pinned_gb_per_s", "moved_load_gb_per_s", "moved_offload_gb_per_s")),
    Part("tests", 580, ("passed", "failed", "skipped")),
    Part("update", 420, ("update_mfu", "shared_update_mfu", "update_peak_gib")),
    *(Part(f"engine.{case}", 240, ENGINE) for case in CASES),
    Part("command", 300, ("run_s", "step_s", "log_probs_difference")),
)


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


def run(part: Part, options: argparse.Namespace, models: Path, log: Path, limit_s: float) -> Result:
    """Run a part with its output in the log; a part that is too slow is ended with its children."""
    results = models / f"{part.name}.xml"
    environment = os.environ | {"PYTHONPATH": path_with_root(), "PYTHONUNBUFFERED": "1"}
    started = time.perf_counter()
    with log.open("a+") as file:
        file.write(f"\n==== {part.name}\n")
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            part.command(options, models, results), cwd=ROOT, env=environment, stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        in_time = wait(process, limit_s)
        seconds = time.perf_counter() - started
        file.seek(start)
        output = file.read()
    outcome = part.read(output, results)
    result = Result(part.name, "PASS", seconds, laws=outcome.laws, figures=outcome.figures)
    if not in_time:
        result.status, result.reason = "TIMEOUT", f"more than {limit_s:.0f} s"
    elif outcome.missing:
        result.status, result.reason = "SKIPPED", f"not installed: {', '.join(outcome.missing)}"
    elif process.returncode and not outcome.laws:
        result.status, result.reason = "ERROR", f"exit status {process.returncode}: {last_line(output)}"
    elif broken := [law["name"] for law in outcome.laws if not law["passed"]]:
        result.status, result.reason = "FAIL", "; ".join(broken)
    elif process.returncode:
        result.status, result.reason = "ERROR", f"exit status {process.returncode} after its last law"
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


def write(folder: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """Replace the files, after each part, so that a run that is cut off leaves what it has."""
    record = machine | {"parts": [asdict(result) for result in results]}
    for name, text in (
        ("gpu_check.json", json.dumps(record, indent=1)),
        ("gpu_check.txt", show(machine, results)),
    ):
        new = folder / f"{name}.new"
        new.write_text(text)
        new.replace(folder / name)


def chosen_parts(only: str | None) -> list[Part]:
    """The parts that `--only` names, in order of value; `engine` means all of its cases."""
    if only is None:
        return list(PARTS)
    names = set(only.split(","))
    known = {name for part in PARTS for name in (part.name, part.name.partition(".")[0])}
    if names - known:
        raise SystemExit(f"gpu_check: unknown parts {sorted(names - known)}: choose from {sorted(known)}")
    return [part for part in PARTS if {part.name, part.name.partition(".")[0]} & names]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="The first hour on a GPU.")
    parser.add_argument("--tiny", action="store_true", help="tiny problems on the CPU, to test the programs")
    parser.add_argument(
        "--only", help=f"parts, separated by commas: {', '.join(part.name for part in PARTS)}"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all parts together")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu_check"), help="folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    parts = chosen_parts(options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "gpu_check.log"
    log.write_text("")
    machine, results, started = describe_machine(), [], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as models:
        for part in parts:
            limit_s = part.limit_s * (TINY_PATIENCE if options.tiny else 1)
            left = options.budget - (time.perf_counter() - started)
            if left < GRACE_S:
                results.append(Result(part.name, "SKIPPED", reason="the budget is spent"))
            else:
                print(f"{part.name} ...", flush=True)
                results.append(run(part, options, Path(models), log, min(limit_s, left)))
            write(options.out, machine, results)
    print(show(machine, results), end="")
    print(f"written: {options.out}/gpu_check.json, .txt, .log")
    return int(any(result.status in ("FAIL", "ERROR", "TIMEOUT") for result in results))


if __name__ == "__main__":
    sys.exit(main())
