# SPDX-License-Identifier: Apache-2.0
"""How hard the fuzz tests search: the same few examples every time, or many new ones (`make fuzz`)."""

import os

from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]

settings.register_profile(
    "ci", max_examples=15, derandomize=True, database=None, deadline=None, suppress_health_check=SLOW_IS_FINE
)
settings.register_profile(
    "deep", max_examples=3000, database=None, deadline=None, suppress_health_check=SLOW_IS_FINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
