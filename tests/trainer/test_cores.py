# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from verl.config.trainer import TrainerConfig
from verl.distributed.backends import BACKENDS
from verl.trainer import command
from verl.trainer.command import check_cores, check_run


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(command, "list_gpus", list)
    monkeypatch.setattr("verl.single_controller.ray.cluster.has_cluster", lambda: False)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_more_processes_than_cores_are_refused_before_ray_starts(device):
    with pytest.raises(
        RuntimeError, match=r"\(8\) is the number of processes on CPU, and this machine has 2"
    ):
        check_cores(TrainerConfig(n_gpus_per_node=8, device=device))


def test_a_run_that_may_find_more_cores_or_needs_none_is_left_alone(monkeypatch):
    check_cores(TrainerConfig(n_gpus_per_node=2, device="cpu"))
    check_cores(TrainerConfig(n_gpus_per_node=8, device="cuda"))
    check_cores(TrainerConfig(n_gpus_per_node=8, nnodes=4, device="cpu"))
    check_cores(TrainerConfig(n_gpus_per_node=8, elastic=True, device="cpu"))
    monkeypatch.setattr("verl.single_controller.ray.cluster.has_cluster", lambda: True)
    check_cores(TrainerConfig(n_gpus_per_node=8, device="cpu"))
    monkeypatch.setattr(command, "list_gpus", lambda: ["a GPU"])
    check_cores(TrainerConfig(n_gpus_per_node=8, device="auto"))


def test_a_machine_without_gpu_is_told_before_torch_is_imported(monkeypatch):
    monkeypatch.setattr("verl.distributed.gpus.gpu_backends", tuple)
    monkeypatch.setattr("verl.distributed.gpus.list_gpus", list)

    with pytest.raises(RuntimeError, match=r"`trainer.device` \(cuda\) needs a GPU, and this machine shows"):
        check_run(TrainerConfig(device="cuda", logger=("console",)))


def test_a_gpu_that_no_driver_reports_is_left_to_torch(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").write_text("")
    shown = replace(BACKENDS["cuda"], files=(f"{tmp_path}/nvidia[0-9]*",))
    monkeypatch.setattr("verl.distributed.gpus.gpu_backends", lambda: (shown,))
    monkeypatch.setattr("verl.distributed.gpus.list_gpus", list)

    check_run(TrainerConfig(device="cuda", logger=("console",), save_checkpoint_path=str(tmp_path)))
