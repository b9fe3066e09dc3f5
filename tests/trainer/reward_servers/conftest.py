# SPDX-License-Identifier: Apache-2.0
from tests.rewards.conftest import reward_file

__all__ = ["reward_file"]
