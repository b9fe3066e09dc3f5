# SPDX-License-Identifier: Apache-2.0
import traceback

import pytest
import torch

from verl.config.ppo import PPOConfig
from verl.config.schema import list_options
from verl.workers.base_worker import MICRO_BATCH_OPTIONS, explained_out_of_memory


def message_of(phase):
    with pytest.raises(torch.OutOfMemoryError) as raised, explained_out_of_memory(phase):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("phase", MICRO_BATCH_OPTIONS)
def test_out_of_memory_errors_name_the_option_of_the_phase(phase):
    assert f"{phase}: set `{MICRO_BATCH_OPTIONS[phase]}` to a smaller number" in message_of(phase)
    assert MICRO_BATCH_OPTIONS[phase] in [entry.key for entry in list_options(PPOConfig)]


def test_other_phases_advise_to_leave_more_memory_free():
    assert "gen: leave more of the GPU free" in message_of("gen")


def test_other_errors_are_unchanged():
    with pytest.raises(ValueError, match=r"^x$") as raised, explained_out_of_memory("old"):
        raise ValueError("x")
    assert not hasattr(raised.value, "__notes__")
