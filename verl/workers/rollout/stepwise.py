# SPDX-License-Identifier: Apache-2.0
"""The former name of `RolloutEngine`, which engines of users may be derived from."""

from verl.workers.rollout.interface import RolloutEngine

StepwiseEngine = RolloutEngine
