# SPDX-License-Identifier: Apache-2.0
"""A real headless Chromium for tests."""

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
    """Start the installed Chromium or playwright's; skip the test if there is neither."""
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if not os.path.exists(found):
            pytest.skip(ADVICE)
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # no sandbox for root
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()
