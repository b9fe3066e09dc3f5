# SPDX-License-Identifier: Apache-2.0
"""A real headless Chromium for tests."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ADVICE = "no Chromium: `apt-get install chromium`, or `python3 -m playwright install chromium`"

PATIENCE_MS = 60_000  # on a busy machine; what is expected never comes if the page is wrong


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start the installed Chromium or playwright's; skip the test if there is neither."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if not os.path.exists(found):
            pytest.skip(ADVICE)
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # no sandbox for root
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


def wait_until(page: Page, is_true: Callable[[], bool]) -> None:
    """Wait for what `expect` has no words for."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not is_true():
        assert time.monotonic() < end, "it does not come to be true"
        page.wait_for_timeout(20)
