# SPDX-License-Identifier: Apache-2.0
"""One virtual cluster for all tests of a process: its imports take longer than most of its steps."""

from collections.abc import Iterator

import pytest

from tests.virtual.measure import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started
