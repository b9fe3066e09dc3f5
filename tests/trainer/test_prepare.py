# SPDX-License-Identifier: Apache-2.0
import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import ray
from ray.util import placement_group_table

from tests.helpers.training import quickstart_arguments
from tests.helpers.warm_runs import cool_down
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.models.tiny import save_tiny_model
from verl.planning.planned_run import planned_ppo
from verl.single_controller.ray.cluster import connect
from verl.trainer.prepare import find_machine_of_run, prepare_run

# Clusters of their own: the processes of runs before them would have to start again.
pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/single_controller")]


@pytest.fixture(scope="module", autouse=True)
def no_cluster():
    cool_down()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_tiny_model(folder / "model")
    (folder / "images").mkdir()
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text('{"problem": "?", "answer": "red"}\n' * 8)
    run_folder = f"trainer.save_checkpoint_path={folder / 'checkpoints'}"
    return load_config(PPOConfig, quickstart_arguments(folder, folder / "model", run_folder))


def refuse():
    raise ValueError(f"refused, with {len(placement_group_table())} placement groups so far")


@pytest.mark.slow  # two more clusters
def test_a_cluster_of_others_is_left_alone_until_the_run_was_checked(config):
    connect(num_cpus=2)
    try:
        with pytest.raises(ValueError, match="with 0 placement"), ExitStack() as stack:
            prepare_run(config, planned_ppo, stack, check=refuse)
        with ExitStack() as stack:
            _, pool, processes = prepare_run(config, planned_ppo, stack)
            assert len(processes.handles) == pool.world_size == 2
        assert processes.handles == [] and ray.is_initialized()
    finally:
        ray.shutdown()


def test_gpus_of_a_cluster_are_used_from_a_machine_without_one(config):
    def on(device):
        return replace(config, trainer=replace(config.trainer, device=device))

    connect(num_cpus=2, num_gpus=2)  # as of another machine: torch finds none here
    try:
        with pytest.raises(ValueError, match="refused"), ExitStack() as stack:
            prepare_run(on("cuda"), planned_ppo, stack, check=refuse)
        with pytest.raises(RuntimeError, match=r"has 2: set trainer\.device=cuda"), ExitStack() as stack:
            prepare_run(on("auto"), planned_ppo, stack, check=refuse)
    finally:
        ray.shutdown()


def test_sizes_follow_from_the_gpus_of_the_cluster_if_this_machine_has_none(tmp_path, monkeypatch):
    driver = tmp_path / "nvidia-smi"  # on the path of the cluster's processes only
    driver.write_text("#!/bin/sh\necho NVIDIA H100, 81559, 559, 570.86\n")
    driver.chmod(0o755)
    with monkeypatch.context() as there:
        there.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        connect(num_cpus=2, num_gpus=2)
    try:
        machine = find_machine_of_run("cuda")
        assert machine.device_bytes == 81000 << 20
        assert "NVIDIA H100" in machine.name
        assert find_machine_of_run("cpu").device == "cpu"
    finally:
        ray.shutdown()


def test_a_cluster_of_its_own_ends_with_a_run_that_is_refused(config):
    with pytest.raises(ValueError, match="with 1 placement"), ExitStack() as stack:
        prepare_run(config, planned_ppo, stack, check=refuse)

    assert not ray.is_initialized()
