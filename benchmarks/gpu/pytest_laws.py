# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that reports each test as a law: `pytest -p benchmarks.gpu.pytest_laws`."""

import pytest

from benchmarks.gpu.report import Report

REPORT = Report()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _fails(report)
    elif report.when == "call" and report.passed:
        REPORT.law(report.nodeid, report.duration, "passes", True)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _fails(report)


def _fails(report: pytest.TestReport | pytest.CollectReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    REPORT.fails(report.nodeid, report.longreprtext if crash is None else crash.message)
