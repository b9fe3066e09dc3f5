# SPDX-License-Identifier: Apache-2.0
"""Steps of published models, to 235B parameters and 1,024 ranks, on a virtual cluster."""

import pytest

from tests.virtual.table import STEPS, row

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_published_model_runs_on_many_gpus(cluster, name):
    print(row(cluster, name))
