# SPDX-License-Identifier: Apache-2.0
"""A real headless Chromium, or the reason why there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ADVICE = "no Chromium: `apt-get install chromium`, or `python3 -m playwright install chromium`"


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start the machine's Chromium, or playwright's own; skips the test where there is neither."""
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if not os.path.exists(found):
            pytest.skip(ADVICE)
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root a sandbox
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()
