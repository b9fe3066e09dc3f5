# SPDX-License-Identifier: Apache-2.0
"""Run the nightly tests of the folders that the last commits changed: `pytest -p tests.helpers.nightly`.

A nightly test belongs to the folder of `verl/` that its own folder mirrors, and to the paths that its marker
names: `nightly("verl/models")`. Without `--last-commits` every nightly test runs.
"""

import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_TIME = "left out: `--minutes` are over"
started = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nightly")
    group.addoption("--last-commits", type=int, help="run only tests of what this many commits changed")
    group.addoption("--minutes", type=float, help="start no test later than this; say which were left out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    changed = None
    if config.getoption("--last-commits"):
        changed = changed_files(config.getoption("--last-commits"))
    chosen, others = [], []
    for item in items:
        marker = item.get_closest_marker("nightly")
        is_chosen = marker and (changed is None or is_touched(watched_paths(item, marker.args), changed))
        (chosen if is_chosen else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - started > 60 * minutes:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    left_out = [report.nodeid for report in skipped if NO_TIME in str(report.longrepr)]
    if left_out:
        terminalreporter.section(f"{len(left_out)} nightly tests {NO_TIME}; `make test-all` runs them")
        terminalreporter.write_line("\n".join(left_out))


def by_day(values: Iterable[Any], *kept: Any, paths: Sequence[str] = ()) -> list[Any]:
    """Return the values of a parameter, nightly but for the kept ones; `paths` as of the marker."""
    mark = pytest.mark.nightly(*paths)
    return [value if value in kept else pytest.param(value, marks=mark) for value in values]


def at_night(values: Iterable[Any], *left: Any, paths: Sequence[str] = ()) -> list[Any]:
    """Return the values of a parameter, of which some are left to the night; `paths` as of the marker."""
    values = list(values)
    return by_day(values, *(value for value in values if value not in left), paths=paths)


def changed_files(commits: int, repository: Path = ROOT) -> list[str]:
    """Return the files that the last commits changed; in a shallow clone, those of the commits it has."""
    known = _git(repository, "rev-list", "--first-parent", f"--max-count={commits + 1}", "HEAD")
    return _git(repository, "diff", "--name-only", "--no-renames", known[-1], "HEAD")


def watched_paths(item: pytest.Item, named: Sequence[str]) -> list[str]:
    """Return the paths that a test guards: its file, the folder that it mirrors, and the named ones."""
    file = item.path.relative_to(ROOT)
    return [file.as_posix(), Path("verl", *file.parent.parts[1:]).as_posix(), *named]


def is_touched(paths: Sequence[str], changed: Iterable[str]) -> bool:
    """Return whether a changed file is one of the paths or below one of them."""
    return any(Path(file).is_relative_to(path) for file in changed for path in paths)


def _git(repository: Path, *arguments: str) -> list[str]:
    found = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()
