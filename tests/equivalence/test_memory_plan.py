# SPDX-License-Identifier: Apache-2.0
"""Planned memory of a model against the measured peak of a process that loads and trains it."""

import pytest

from tests.helpers.memory import PPO, SFT, SHAPES, Rows, make_case, measure_phases, planned_phases
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.heavy

TOLERANCE = 0.15


def check(folder, name, checkpointings, world_size=1, kind=PPO):
    model = save_tiny_model(folder, "qwen2", **SHAPES[name])
    cases = [make_case(kind, model, Rows(), checkpointing=on, world_size=world_size) for on in checkpointings]
    measured = measure_phases(cases, world_size)
    for case, peaks in zip(cases, measured, strict=True):
        planned = planned_phases(case, world_size)
        ratios = {phase: planned[phase] / peaks[phase] for phase in kind.phases}
        assert all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values()), (ratios, planned, peaks)


@pytest.mark.slow  # tests/gpu/test_memory_cuda.py measures a model in every suite
def test_a_model_with_a_large_vocabulary_takes_what_is_planned(tmp_path):
    check(tmp_path, "vocabulary", [True])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_takes_what_is_planned_with_and_without_checkpointing(tmp_path, name):
    check(tmp_path, name, [True, False])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_take_what_is_planned(tmp_path, name):
    check(tmp_path, name, [True], world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_fine_tuned_model_takes_what_is_planned(tmp_path, name):
    check(tmp_path, name, [True, False], kind=SFT)
