# SPDX-License-Identifier: Apache-2.0
"""A whole run on images and videos that is watched while it trains."""

import re
import subprocess
import sys
import time

import pytest

from tests.helpers.training import QUICKSTART, ROOT, quickstart_arguments
from tests.helpers.viewer import request

sys.path.insert(0, str(QUICKSTART))
from demo import KINDS

from verl.models.tiny import save_tiny_model

ADDRESS = re.compile(r"the run can be watched: address=(http://\S+)")
STEPS = 3


def wait_for(condition, run, seconds=200.0):
    """What the condition gives, once it gives something; the run must live until then."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_run_shows_its_rollouts_and_media_while_it_trains_and_takes_the_page_along_when_it_ends(
    kind, tmp_path
):
    demo = KINDS[kind]
    save_tiny_model(tmp_path / "model", demo.family)
    demo.write(tmp_path, "train", 16, 1)
    demo.write(tmp_path, "val", 5, 2)
    arguments = quickstart_arguments(
        tmp_path, tmp_path / "model", *demo.options, f"data.image_dir={tmp_path / demo.media}",
        "data.rollout_batch_size=8", "worker.actor.global_batch_size=8", "trainer.val_freq=-1",
        f"trainer.max_steps={STEPS}", "trainer.viewer_port=0", "trainer.rollouts_to_keep=2",
        f"trainer.save_checkpoint_path={tmp_path / 'out'}",
    )  # fmt: skip
    log = tmp_path / "stderr"
    command = [sys.executable, "-m", "verl.trainer.main", *arguments]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log.open("w"))
    try:
        address = wait_for(lambda: ADDRESS.search(log.read_text()), run)[1]
        state = wait_for(lambda: request(address, "/api/runs").json[0], run)
        assert state["name"] == "out"
        wait_for(lambda: request(address, "/api/runs").json[0]["num_rollouts"], run)

        rows = request(address, "/api/rollouts?run=0&step_max=1").json["rows"]
        group = request(address, f"/api/runs/0/groups/1/{rows[0]['group']}").json
        (medium,) = group[0]["media"]
        picture = request(address, f"/media/0/{medium['files'][0]}")
        assert run.wait(200) == 0, log.read_text()[-4000:]
    finally:
        run.kill()
    assert len({row["group"] for row in rows}) == 2
    assert medium["kind"] == kind and medium["problem"] is None
    assert picture.body[:3] == b"\xff\xd8\xff"
    with pytest.raises(ConnectionRefusedError):
        request(address, "/api/runs")
