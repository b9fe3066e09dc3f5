# SPDX-License-Identifier: Apache-2.0
from verl.trainer.metrics import StageTimer


def test_after_a_stage_inside_another_the_outer_one_is_announced_again():
    announced = []
    timer = StageTimer(announced.append)

    with timer("step"):
        with timer("gen"), timer("sync_weights"):
            pass
        with timer("update_actor"):
            pass

    assert announced == ["step", "gen", "sync_weights", "gen", "step", "update_actor", "step"]
    assert set(timer.seconds) == {"step", "gen", "sync_weights", "update_actor"}
