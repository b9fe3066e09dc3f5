# SPDX-License-Identifier: Apache-2.0
"""A reward function in its own process, as training has it."""

import textwrap

import pytest

from tests.trainer.rollouts.sampling import REWARD
from verl.config.worker import RewardConfig
from verl.rewards.manager import RewardManager


@pytest.fixture(scope="session")
def reward_manager(tmp_path_factory):
    """Scores the responses of `tests.trainer.rollouts.sampling.Engine`."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(textwrap.dedent(REWARD).lstrip("\n"))
    with RewardManager(RewardConfig(reward_function=str(path))) as manager:
        yield manager
