# SPDX-License-Identifier: Apache-2.0
"""The planned memory of a model against what it takes of a device."""

import pytest

from tests.gpu.alone import run_alone, run_apart
from tests.helpers.memory import (
    PAGES_OF_ITS_OWN,
    PPO,
    SHAPES,
    Rows,
    make_case,
    measure,
    planned_phases,
)
from verl.models.tiny import save_tiny_model

TOLERANCE = 0.15
ROWS = {"cpu": Rows(), "cuda": Rows(prompt_length=512, response_length=512)}
HELD = ("update_actor", "old")  # while it loads, a tensor at a time is whole beside its shard


CASES = [
    pytest.param("cpu", "wide", True, marks=pytest.mark.heavy),  # tests/equivalence has the others
    *(
        pytest.param("cuda", name, checkpointing, marks=pytest.mark.gpu(1))
        for name in SHAPES
        for checkpointing in (True, False)
    ),
]


@pytest.mark.nightly("verl/planning", "verl/models", "verl/distributed")
@pytest.mark.parametrize(("device", "name", "checkpointing"), CASES)
def test_a_model_takes_of_a_device_what_is_planned(tmp_path, monkeypatch, device, name, checkpointing):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(PAGES_OF_ITS_OWN))
    model = save_tiny_model(tmp_path, "qwen2", **SHAPES[name])
    case = make_case(PPO, model, ROWS[device], checkpointing=checkpointing)

    run = run_alone if device == "cpu" else run_apart  # what a process has freed counts on the CPU
    measured = run(measure, case, device, device=device)

    planned = planned_phases(case, device=device)
    ratios = {phase: planned[phase] / measured[phase] for phase in HELD}
    assert all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values()), (ratios, planned, measured)
