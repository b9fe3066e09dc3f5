# SPDX-License-Identifier: Apache-2.0
"""The planned memory of a model against what its tensors take of a GPU."""

import pytest

from tests.gpu.alone import run_alone
from tests.helpers.memory import PPO, SHAPES, Rows, make_case, measure, planned_phases
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.gpu(1)

TOLERANCE = 0.15
ROWS = Rows(prompt_length=512, response_length=512)
HELD = ("update_actor", "old")  # while it loads, a tensor at a time is whole beside its shard


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_takes_of_a_gpu_what_is_planned(tmp_path, name, checkpointing):
    model = save_tiny_model(tmp_path, "qwen2", **SHAPES[name])
    case = make_case(PPO, model, ROWS, checkpointing=checkpointing)

    measured = run_alone(measure, case, "cuda")

    planned = planned_phases(case, device="cuda")
    ratios = {phase: planned[phase] / measured[phase] for phase in HELD}
    assert all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values()), (ratios, planned, measured)
