# SPDX-License-Identifier: Apache-2.0
"""A browser and its page for the tests of the viewer's page."""

import pytest

from tests.helpers.browser import open_browser

GONE = "net::ERR_CONNECTION_REFUSED"  # after a test ended its server


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser):
    """A page that fails the test on an error or a request to another server."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda sent: faults.append(sent.url) if "//127.0.0.1:" not in sent.url else None)
    yield page
    context.close()
    assert [fault for fault in faults if not fault.endswith(GONE)] == []
