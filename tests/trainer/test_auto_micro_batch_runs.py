# SPDX-License-Identifier: Apache-2.0
"""Whole runs that choose their own micro batches."""

import re

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, read_metrics, start_training, train
from verl.trainer.main import main

UPDATE = "worker.actor.micro_batch_size_per_device_for_update"
EXPERIENCE = "worker.actor.micro_batch_size_per_device_for_experience"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("auto"), train=8, val=4)


def arguments_of(folder, *options):
    common = [
        "worker.rollout.name=hf",
        "worker.actor.fsdp.mp_param_dtype=fp32",
        "trainer.max_steps=1",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.n_gpus_per_node=2",
    ]
    return quickstart_arguments(folder, folder / "model", *common, *options)


def check_console(printed, errors, output):
    """Assert that a run of one step prints its phases, a row and its end, and that no package adds lines."""
    titles = ["step", "reward", "val", "length", "cut", "entropy", "grad", "mismatch", "tokens/s", "seconds"]
    lines = [line for line in printed.splitlines() if not line.endswith(" ...")]  # a phase took long
    phases = [
        "Ray and libraries", "model files", "rewards of samples", "data", "workers", "models and engine",
    ]  # fmt: skip

    assert lines[0].startswith("starting ") and lines[0].endswith(f" with 2 processes: {output}"), printed
    assert [re.sub(r"^  | +\d+\.\d s$", "", line) for line in lines[1:7]] == phases, printed
    assert re.fullmatch(r"ready after \d+\.\d s", lines[7])
    assert lines[8].split() == titles
    assert re.match(r"1/1 +\S+ ", lines[9])
    assert lines[10] == "validation at step 1"
    assert [line.split()[0] for line in lines[11:14]] == ["prompt", "response", "answer"]
    end = next(index for index, line in enumerate(lines) if line.startswith("finished"))
    assert re.fullmatch(r"finished 1 step in \d:\d\d:\d\d", lines[end])
    assert re.fullmatch(r"  best validation   \d\.\d{3} at step 1", lines[end + 1])
    shown = [
        re.sub(r"\S+/(?=verl-)", "", line) for line in lines[end + 2 :]
    ]  # where they are not on the PATH
    assert shown == [
        f"  last checkpoint   {output}/global_step_1",
        f"  curves            {output}/experiment_log.jsonl",
        f"  look              verl-view {output}",
        f"  export            verl-merge --local_dir {output}/global_step_1/actor",
    ]
    assert "\x1b" not in printed  # Ray colors the rank before the lines of a worker on stderr
    assert not [
        line
        for line in errors.splitlines()
        if not re.match(r"(\S*\(rank .*?\)\S* )?\S+ (INFO|WARNING) ", line)
    ]


@pytest.mark.slow
def test_a_run_with_auto_learns_the_same_as_a_run_with_a_number(folder, tmp_path):
    finished = start_training(
        *arguments_of(folder, f"{UPDATE}=auto", f"{EXPERIENCE}=auto"),
        "trainer.logger=[console,file]",
        f"trainer.save_checkpoint_path={tmp_path / 'auto'}",
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    check_console(finished.stdout, finished.stderr, tmp_path / "auto")
    auto = read_metrics(tmp_path / "auto")
    one = train(tmp_path / "one", *arguments_of(folder, f"{UPDATE}=1", f"{EXPERIENCE}=1"))

    assert learned(auto[1]).keys() == learned(one[1]).keys()
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy_loss", "critic/score/mean"):
        assert auto[1][name] == pytest.approx(one[1][name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_dry_run_reports_the_value_of_auto(folder):
    finished = start_training(*arguments_of(folder, f"{UPDATE}=auto", f"{EXPERIENCE}=auto"), "--dry-run")

    assert finished.returncode == 0, finished.stderr
    # 2 prompts x 4 responses on 2 ranks are 4 sequences in a mini batch; 4 prompts are 8 in a step.
    assert f"auto: {UPDATE}=4" in finished.stdout
    assert f"auto: {EXPERIENCE}=8" in finished.stdout


def test_a_machine_that_is_too_small_is_refused_with_a_remedy(folder, capsys):
    status = main([*arguments_of(folder, f"{UPDATE}=auto"), "--dry-run", "--device-memory-gb=1"])

    told = capsys.readouterr().err
    assert status == 2
    assert f"`{UPDATE}` (auto): not even one sequence fits: update_actor takes" in told


@pytest.mark.parametrize("size", ["0", "-4", "much"])
def test_a_memory_size_that_is_not_a_positive_number_is_refused(folder, capsys, size):
    assert main([*arguments_of(folder), "--dry-run", f"--device-memory-gb={size}"]) == 2
    assert "must be a number of GiB above zero" in capsys.readouterr().err
