# SPDX-License-Identifier: Apache-2.0
"""The report of a part of `scripts/gpu_check.sh`: each law and figure is printed as a JSON line when found.

A law is a number and its bound: `report.at_most("log-probs", 3e-4, 1e-2)`. A figure is a number with its unit
in its name. A part that is cut off keeps the lines that it has printed.
"""

import importlib.util
import json
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")
LINES = ('{"law": ', '{"figure": ')
ERROR_CHARS = 150  # at both ends


class Report:
    """Prints laws and figures."""

    def at_most(self, name: str, found: float, bound: float) -> None:
        self.law(name, found, f"<= {bound:g}", found <= bound)

    def at_least(self, name: str, found: float, bound: float) -> None:
        self.law(name, found, f">= {bound:g}", found >= bound)

    def holds(self, name: str, passed: bool) -> None:
        self.law(name, float(passed), "true", passed)

    def fails(self, name: str, error: str) -> None:
        """An error instead of a number."""
        if len(error) > 2 * ERROR_CHARS:
            error = f"{error[:ERROR_CHARS]} ... {error[-ERROR_CHARS:]}"
        self.law(name, error, "no error", False)

    def law(self, name: str, found: float | str, bound: str, passed: bool) -> None:
        self._print({"law": name, "found": found, "bound": bound, "passed": bool(passed)})

    def figure(self, name: str, value: Any) -> None:
        self._print({"figure": name, "value": value})

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step of the part; its error is a broken law and does not stop the other steps."""
        try:
            step(self, *args)
        except Exception as error:  # noqa: BLE001 - reported; the next step may still run
            traceback.print_exc()
            self.fails(step.__name__, f"{type(error).__name__}: {error}")

    def _print(self, line: dict[str, Any]) -> None:
        print(f"\n{json.dumps(line)}", flush=True)  # a progress bar may not have ended its line


@dataclass
class Outcome:
    """Findings of a part; `missing` names packages without which some of it cannot run."""

    laws: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def read_report(output: str) -> Outcome:
    """Read the lines of a part; a law that could not be checked without a package is left out."""
    outcome = Outcome()
    for line in output.splitlines():
        if not line.startswith(LINES):
            continue
        with suppress(json.JSONDecodeError):  # cut off
            found = json.loads(line)
            if "figure" in found:
                outcome.figures[found["figure"]] = found["value"]
            elif lacking := missing_modules(str(found["found"])):
                outcome.missing += lacking
            else:
                outcome.laws.append(found)
    if not outcome.laws and not outcome.missing:
        outcome.missing = missing_modules(output)
    outcome.missing = sorted(set(outcome.missing))
    return outcome


def missing_modules(text: str) -> list[str]:
    """Packages that an error names and that are not installed.

    A module that is missing from an installed package is an error, not a missing package.
    """
    packages = dict.fromkeys(name.partition(".")[0] for name in NO_MODULE.findall(text))
    return [name for name in packages if importlib.util.find_spec(name) is None]
