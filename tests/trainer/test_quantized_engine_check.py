# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.planning.test_memory_plan import make_config
from verl.planning.planned_run import planned_ppo
from verl.trainer.model_checks import check_quantized_engine


def test_auto_that_turns_out_to_be_a_cpu_is_refused_before_a_model_is_read():
    correction = {"algorithm.rollout_correction.rollout_is": "token"}
    run = planned_ppo(make_config({"worker.rollout.quantization": "fp8"} | correction))

    with pytest.raises(ValueError, match=r"`worker\.rollout\.quantization` must be null on CPU .* got 'fp8'"):
        check_quantized_engine(run, "cpu")
    check_quantized_engine(run, "cuda")
    check_quantized_engine(planned_ppo(make_config()), "cpu")
