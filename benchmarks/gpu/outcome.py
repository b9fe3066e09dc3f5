# SPDX-License-Identifier: Apache-2.0
"""The laws and figures in the output of a part's program."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")
ASKED_MFU = 0.45  # of an update of the 3B shape


@dataclass
class Outcome:
    """Findings of a part; `missing` names the packages without which it cannot run."""

    laws: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def missing_modules(text: str) -> list[str]:
    """Packages that an error names and that are not installed.

    A module that is missing from an installed package is an error, not a missing package.
    """
    packages = dict.fromkeys(name.partition(".")[0] for name in NO_MODULE.findall(text))
    return [name for name in packages if importlib.util.find_spec(name) is None]


def last_json(output: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; libraries may print more while they shut down."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    return None


def read_report(output: str) -> Outcome:
    """Read what `Report.end` printed."""
    found = last_json(output)
    if found is None:
        return Outcome(missing=missing_modules(output))
    errors = " ".join(law["found"] for law in found["laws"] if isinstance(law["found"], str))
    return Outcome(found["laws"], found["figures"], missing_modules(errors))


def read_update(output: str) -> Outcome:
    """Read the result of `benchmarks/gpu_update.py`."""
    found = last_json(output)
    if found is None:
        return Outcome(missing=missing_modules(output))
    figures = {key: value for key, value in found.items() if not isinstance(value, dict)}
    figures |= {
        f"{name}_{key}": value
        for name, row in found.items() if isinstance(row, dict)
        for key, value in row.items() if value is not None
    }  # fmt: skip
    mfu, laws = found["update"]["mfu"], []
    difference = found["shared_difference"]
    laws.append(
        {
            "name": "log-probs with shared and repeated prompts",
            "found": difference,
            "bound": "<= 0.05",
            "passed": difference <= 0.05,
        }
    )
    if mfu is not None:
        passed = mfu >= ASKED_MFU
        laws.append({"name": "MFU of the update", "found": mfu, "bound": f">= {ASKED_MFU}", "passed": passed})
    return Outcome(laws, figures)


def read_tests(results: Path) -> Outcome:
    """Read pytest's JUnit file; a test that lacks a package counts as skipped."""
    if not results.exists():
        return Outcome(missing=[] if importlib.util.find_spec("pytest") else ["pytest"])
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    laws, missing = [], []
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        lacking = [] if problem is None else missing_modules(f"{problem.get('message')}{problem.text}")
        if problem is not None and not lacking:
            name = f"{case.get('classname')}.{case.get('name')}"
            laws.append(
                {
                    "name": name,
                    "found": (problem.get("message") or "")[:300],
                    "bound": "passes",
                    "passed": False,
                }
            )
            counts["failed"] += 1
        else:
            is_skipped = lacking or case.find("skipped") is not None
            counts["skipped" if is_skipped else "passed"] += 1
            missing += lacking
    laws.append(
        {"name": "tests pass", "found": counts["failed"], "bound": "<= 0", "passed": not counts["failed"]}
    )
    figures = counts | ({"not_installed": sorted(set(missing))} if missing else {})
    return Outcome(laws, figures, [] if counts["passed"] or counts["failed"] else sorted(set(missing)))
