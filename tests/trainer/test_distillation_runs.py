# SPDX-License-Identifier: Apache-2.0
"""Whole runs with teachers on one CPU process or two."""

import json
import sys

import pytest

from tests.helpers.fine_tuning import arguments_for, write_conversations
from tests.helpers.quickstart import make_folder
from tests.helpers.training import QUICKSTART, learned, quickstart_arguments, train
from tests.helpers.warm_runs import warm_processes
from tests.trainer.test_sft_runs import fine_tune
from verl.models.tiny import save_tiny_model
from verl.trainer.main import main

sys.path.insert(0, str(QUICKSTART))
from moving import write_video_questions

pytestmark = pytest.mark.heavy

ALONE = ("distillation.enabled=true", "distillation.distillation_loss.use_task_rewards=false")
TEACHERS = "distillation.teacher_models"
ONE_PROCESS = "trainer.n_gpus_per_node=1"  # tests/equivalence/test_distillation.py divides batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("distillation"))
    save_tiny_model(folder / "teacher", "qwen2", seed=7, num_hidden_layers=3)
    save_tiny_model(folder / "other", "qwen2", seed=8)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    named = (row | {"data_source": ("one", "two")[number % 2]} for number, row in enumerate(rows))
    (folder / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    return folder


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this process; the command as a process of its own would import and start all of it again."""
    with warm_processes():
        yield


def two_teachers(folder, *overrides):
    return quickstart_arguments(
        folder, folder / "model", *ALONE, f"data.train_files={folder / 'named.jsonl'}",
        f"{TEACHERS}.one.model_path={folder / 'teacher'}", f"{TEACHERS}.two.model_path={folder / 'other'}",
        "trainer.max_steps=4", "trainer.save_freq=2", "trainer.debug=true", "worker.actor.entropy_coef=0",
        *overrides,
    )  # fmt: skip


@pytest.mark.slow  # three runs; resumed runs of other kinds are in every suite
def test_a_resumed_run_with_two_teachers_equals_an_unbroken_one(folder):
    whole = train(folder / "whole", *two_teachers(folder))
    train(folder / "resumed", *two_teachers(folder), "trainer.max_steps=2")

    resumed = train(folder / "resumed", *two_teachers(folder))

    assert whole[1]["distillation/kl/one"] > 0 and whole[1]["distillation/kl/two"] > 0
    for step in (3, 4):
        assert learned(resumed[step]) == learned(whole[step])


@pytest.mark.nightly("verl/workers", "verl/algorithms")
def test_token_rewards_of_the_teacher_lower_the_kl_next_to_those_of_the_task(folder):
    metrics = train(
        folder / "rewards",
        *quickstart_arguments(
            folder, folder / "model", "distillation.enabled=true", "trainer.max_steps=6",
            "distillation.distillation_loss.loss_mode=k1", "worker.actor.entropy_coef=0",
            "distillation.distillation_loss.use_policy_gradient=true", ONE_PROCESS,
            f"{TEACHERS}.big.model_path={folder / 'teacher'}",
        ),
    )  # fmt: skip

    assert metrics[6]["distillation/kl"] < metrics[1]["distillation/kl"]
    assert metrics[1]["timing_s/teacher"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{TEACHERS}.one.key=math"],
            "`data_source` must name a teacher, one of ['math', 'two'], got 'one'",
        ),
        ([f"{TEACHERS}.one.tokenizer_path=MORE"], "must have the tokenizer of the policy:"),
    ],
)
def test_rows_without_a_teacher_and_teachers_of_other_tokens_end_the_run_before_models_load(
    folder, cluster, capsys, overrides, message
):
    more = save_tiny_model(folder / "more", "qwen3", words=("red", "green"))
    overrides = [override.replace("MORE", str(more)) for override in overrides]

    arguments = two_teachers(folder, f"trainer.save_checkpoint_path={folder / 'refused'}", *overrides)

    assert main(arguments) == 2

    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told and "verl.optim.build" not in told


@pytest.mark.slow  # tests/equivalence/test_video_teacher.py compares such a teacher in every suite
def test_a_run_whose_teacher_sees_more_frames_than_the_policy_keeps_its_prompts_apart(tmp_path):
    save_tiny_model(tmp_path / "model", "qwen2_5_vl")
    save_tiny_model(tmp_path / "teacher", "qwen2_5_vl", seed=1)
    for name, count in (("train", 8), ("val", 4)):
        write_video_questions(tmp_path, name, count, 1)

    metrics = train(
        tmp_path / "out",
        *quickstart_arguments(
            tmp_path, tmp_path / "model", *ALONE, f"data.image_dir={tmp_path / 'videos'}",
            "worker.rollout.num_video_frames=2", "trainer.max_steps=2", "trainer.debug=true",
            "worker.actor.entropy_coef=0", f"{TEACHERS}.big.model_path={tmp_path / 'teacher'}",
            f"{TEACHERS}.big.num_video_frames=8", f"{TEACHERS}.big.max_prompt_length=96",
        ),
    )  # fmt: skip

    assert metrics[2]["distillation/kl"] > 0


@pytest.mark.nightly("verl/workers", "verl/algorithms")
def test_fine_tuning_on_a_teachers_distributions_lowers_the_kl(folder):
    for name in ("train", "val"):
        write_conversations(folder, name, 32, 3)

    metrics = fine_tune(
        folder / "sft",
        *arguments_for(
            folder, *ALONE, "trainer.max_steps=8", ONE_PROCESS,
            "distillation.distillation_loss.loss_mode=forward_kl",
            f"{TEACHERS}.big.model_path={folder / 'teacher'}",
        ),
    )  # fmt: skip

    assert metrics[8]["distillation/kl"] < 0.8 * metrics[1]["distillation/kl"]
    assert metrics[1]["distillation/loss"] == pytest.approx(metrics[1]["distillation/kl"])
