# SPDX-License-Identifier: Apache-2.0
"""The reward functions that are shipped."""

from pathlib import Path

REWARD_FUNCTIONS = sorted((Path(__file__).parents[2] / "examples" / "reward_function").glob("*.py"))


def scores_pictures(path: Path) -> bool:
    """Return whether a reward function is for diffusion models."""
    source = path.read_text()
    return '"images"' in source or "graders.pictures" in source
