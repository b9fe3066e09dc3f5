# SPDX-License-Identifier: Apache-2.0
"""Bad input as a user meets it: one clear message, the right exit status, and nothing left behind.

What a config can show is found before anything starts; what is wrong in a file, before a model is loaded;
what only a response can show ends the run, which says where to go on.
"""

import dataclasses
import json
import os
import shutil
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.training import QUICKSTART, quickstart_arguments
from tests.helpers.warm_runs import warm_processes
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.models.tiny import save_tiny_model
from verl.rewards.manager import RewardManager
from verl.trainer.main import main
from verl.trainer.run.run_once import open_trainer

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = pytest.mark.heavy
nightly = pytest.mark.nightly("verl/data", "verl/rewards", "verl/checkpoint", "verl/trainer")

REWARD = "def compute_score(inputs):\n    return [{'overall': 0.0} for _ in inputs]\n"
IMAGE = {"problem": "<image>What colour?", "answer": "red"}
VIDEO = {"problem": "<video>What colour?", "answer": "red"}


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this process, whose start every test here would pay for otherwise."""
    with warm_processes():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text model and an image model with their questions, and the files that are wrong."""
    folder = tmp_path_factory.mktemp("input")
    for name, family in (("text", "qwen2"), ("image", "qwen2_5_vl")):
        (folder / name).mkdir()
        save_tiny_model(folder / name / "model", family)
        for split, count in (("train", 8), ("val", 5)):
            write_questions(folder / name, split, count, seed=1, with_images=name == "image")
    (folder / "file").write_text("")
    (folder / "cut.png").write_bytes(next((folder / "image/images").glob("*.png")).read_bytes()[:20])
    (folder / "cut.mp4").write_bytes(b"\0" * 100)
    write_rows(folder / "cut_image.jsonl", IMAGE | {"images": ["../../cut.png"]})
    write_rows(folder / "no_image.jsonl", IMAGE | {"images": ["gone.png"]})
    write_rows(folder / "cut_video.jsonl", VIDEO | {"videos": ["../../cut.mp4"]})
    image = next((folder / "image/images").glob("*.png")).name
    write_rows(folder / "more_markers.jsonl", IMAGE | {"problem": "<image><image>?", "images": [image]})
    (folder / "not_json.jsonl").write_text('{"problem": "?", "answer": "red"}\n{"problem"\n')
    (folder / "reward.py").write_text(REWARD)
    (folder / "import.py").write_text("import no_such_package\n" + REWARD)
    (folder / "open.jinja").write_text("{{ content ")
    (folder / "unknown.jinja").write_text("{{ contents.text }}")
    return folder


@pytest.fixture(scope="module")
def trainer(cluster, folder):
    """A whole trainer with its workers; a test may give it another reward function."""
    overrides = ["worker.rollout.name=hf", "trainer.val_before_train=false", "trainer.val_freq=-1"]
    config = load_config(PPOConfig, arguments_for(folder, "text", *overrides))
    with ExitStack() as stack:
        yield open_trainer(config, stack)


def cases(table, often):
    """The cases of a table; all but the first few are nightly."""
    marks = [() if index < often else (nightly,) for index in range(len(table))]
    return [
        pytest.param(*case, id=name, marks=mark)
        for (name, case), mark in zip(table.items(), marks, strict=True)
    ]


def write_rows(path, row):
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))


def arguments_for(folder, kind, *overrides):
    run_folder = f"trainer.save_checkpoint_path={folder / 'run'}"
    return quickstart_arguments(folder / kind, folder / kind / "model", run_folder, *overrides)


def reward_processes():
    lines = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one of Ray's that just ended
            lines.append(" ".join(child.cmdline()))
    return [line for line in lines if "verl.rewards.worker_process" in line]


def check_nothing_is_left(folder):
    assert not (folder / "run").exists()
    assert not list(Path("/dev/shm").glob(f"verl-media-*-{os.getpid()}-*"))
    assert not reward_processes()


BAD_CONFIGS = {
    "unknown key": (["trainer.save_frq=3"], ["`trainer.save_frq`", "did you mean `trainer.save_freq`?"]),
    "wrong type": (["trainer.save_freq=often"], ["`trainer.save_freq` must be an integer, got 'often'"]),
    "wrong choice": (["worker.rollout.name=trtllm"], ["`worker.rollout.name` must be one of", "'trtllm'"]),
    "one response for GRPO": (["worker.rollout.n=1"], ["`worker.rollout.n` must be at least 2", "grpo"]),
    "sizes that do not divide": (
        ["data.rollout_batch_size=6", "worker.actor.global_batch_size=4"],
        ["`data.rollout_batch_size` (6) must be divisible by `worker.actor.global_batch_size` (4)"],
    ),
    "batch smaller than the ranks": (
        ["data.rollout_batch_size=1", "worker.actor.global_batch_size=1"],
        ["`data.rollout_batch_size` (1) must be divisible by the number of rollout engines", "(2)"],
    ),
    "no model": (["worker.actor.model.model_path=/no/model"], ["model.model_path`: no folder /no/model"]),
    "no data": (["data.train_files=/no/data.jsonl"], ["`data.train_files`: no file or folder /no/data"]),
    "no template": (["data.format_prompt=/no/t.jinja"], ["`data.format_prompt`: no file /no/t.jinja"]),
    "no reward file": (
        ["worker.reward.reward_function=/no/reward.py:f"],
        ["`worker.reward.reward_function`: no file /no/reward.py"],
    ),
    "no reward function": (
        ["worker.reward.reward_function={folder}/reward.py:compute"],
        ["reward.py has no function 'compute'", "['compute_score']"],
    ),
    "unwritable checkpoint folder": (
        ["trainer.save_checkpoint_path={folder}/file/run"],
        ["`trainer.save_checkpoint_path` must be a folder that can be written", "/file is a file"],
    ),
    "not a checkpoint": (
        ["trainer.load_checkpoint_path={folder}/text"],
        ["`trainer.load_checkpoint_path` must end with a folder named `global_step_N`"],
    ),
}


@pytest.mark.parametrize("overrides, expected", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_bad_option_is_told_before_anything_starts(overrides, expected, folder, capsys):
    overrides = [override.format(folder=folder) for override in overrides]

    assert main(arguments_for(folder, "text", *overrides)) == 2

    told = capsys.readouterr().err
    assert all(part in told for part in expected), told
    assert "Traceback" not in told
    check_nothing_is_left(folder)


BAD_FILES = {
    "reward file that does not import": (
        "text",
        ["worker.reward.reward_function={folder}/import.py:compute_score"],
        ["`worker.reward.reward_function`: importing", "import.py:1", "no_such_package"],
    ),
    "reward function without that argument": (
        "text",
        [
            "worker.reward.reward_function={folder}/reward.py:compute_score",
            "worker.reward.reward_function_kwargs={{weight: 1}}",
        ],
        ["`worker.reward.reward_function_kwargs` ({'weight': 1})", "reward.py:1 `compute_score`"],
    ),
    "missing column": (
        "text",
        ["data.prompt_key=question"],
        ["train.jsonl has no column `question`: it has ['answer', 'problem']; set `data.prompt_key=problem`"],
    ),
    "damaged rows": (
        "text",
        ["data.train_files={folder}/not_json.jsonl"],
        ["not_json.jsonl cannot be read: line 2 is not JSON"],
    ),
    "damaged template": (
        "text",
        ["data.format_prompt={folder}/open.jinja"],
        ["`data.format_prompt` (", "open.jinja), line 1: unexpected end of template"],
    ),
    "template with an unknown column": (
        "text",
        ["data.format_prompt={folder}/unknown.jinja"],
        [
            "train.jsonl, rows 0, 1, 2 and 5 more: the template `data.format_prompt`",
            "'contents' is undefined",
        ],
    ),
    "prompts that are too long": (
        "text",
        ["data.max_prompt_length=4"],
        ["8 prompts are longer than `data.max_prompt_length` (4)"],
    ),
    "fewer rows than a batch": (
        "text",
        ["data.rollout_batch_size=16"],
        ["`data.rollout_batch_size` (16) must be at most the number of usable training rows, got 8"],
    ),
    "corrupt image": (
        "image",
        ["data.train_files={folder}/cut_image.jsonl"],
        [
            "cut_image.jsonl, rows 0, 1, 2 and 5 more: the image",
            "cut.png cannot be read",
            "`data.on_bad_row=skip`",
        ],
    ),
    "missing image": (
        "image",
        ["data.train_files={folder}/no_image.jsonl"],
        [
            "no_image.jsonl, rows 0, 1, 2 and 5 more: the image",
            "gone.png cannot be read: there is no such file",
        ],
    ),
    "corrupt video": (
        "image",
        ["data.train_files={folder}/cut_video.jsonl"],
        ["cut_video.jsonl, rows 0, 1, 2 and 5 more: the video", "cut.mp4 cannot be read"],
    ),
    "more markers than images": (
        "image",
        ["data.train_files={folder}/more_markers.jsonl"],
        ["rows 0, 1, 2 and 5 more: the prompt has 2 <image> but the row has 1 images in column `images`"],
    ),
    "images for a text model": (
        "text",
        ["data.train_files={folder}/more_markers.jsonl"],
        ["rows 0, 1, 2 and 5 more: the row has images or videos, which the model cannot read"],
    ),
}


@pytest.mark.parametrize("kind, overrides, expected", cases(BAD_FILES, 5))
def test_a_bad_file_is_told_before_a_model_is_loaded(kind, overrides, expected, folder, cluster, capsys):
    overrides = [override.format(folder=folder) for override in overrides]

    assert main(arguments_for(folder, kind, *overrides)) == 2

    told = capsys.readouterr().err
    assert all(part in told for part in expected), told
    assert "most recent call last" not in told.replace("Traceback in the reward function (most recent", "")
    check_nothing_is_left(folder)


def test_a_cluster_that_is_too_small_exits_1(folder, cluster, capsys):
    sizes = [f"{name}=64" for name in ("data.rollout_batch_size", "worker.actor.global_batch_size")]
    rows = (folder / "text/train.jsonl").read_text()
    (folder / "many.jsonl").write_text(rows * 8)
    options = ["trainer.n_gpus_per_node=64", f"data.train_files={folder / 'many.jsonl'}", *sizes]

    assert main(arguments_for(folder, "text", *options)) == 1

    told = capsys.readouterr().err
    assert "`trainer.n_gpus_per_node` (64) on cpu needs 1 nodes with 64 CPUs each, found 1 nodes" in told
    assert "lower `trainer.n_gpus_per_node`" in told
    check_nothing_is_left(folder)


def test_an_unsupported_version_exits_1_with_the_command_that_repairs_it(folder, capsys, monkeypatch):
    monkeypatch.setattr("verl.utils.version_check.version", lambda name: "1.0.0")

    assert main(arguments_for(folder, "text")) == 1

    assert "torch: found 1.0.0, needed ==2.13.*: pip install 'torch==2.13.*'" in capsys.readouterr().err


def test_a_logger_that_is_not_installed_exits_2_before_a_model_is_loaded(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed

    assert main(arguments_for(folder, "text", "trainer.logger=[file,wandb]")) == 2

    assert "`trainer.logger` 'wandb' needs the package" in capsys.readouterr().err
    check_nothing_is_left(folder)


BAD_REWARDS = {
    "raises": ("raise KeyError('no such column')", ["raised KeyError: 'no such column'", "reward.py:2"]),
    "hangs": ("while True: pass", ["did not return within `worker.reward.timeout_s` (2 s)", "reward.py:2"]),
    "no overall": ("return [{'accuracy': 1.0} for _ in inputs]", ["with `overall`", "['accuracy']"]),
    "nan": ("return [{'overall': float('nan')} for _ in inputs]", ["must be a finite number, got nan"]),
    "wrong length": (
        "return [{'overall': 1.0}]",
        ["must return a list of", "dicts, one per response, got 1"],
    ),
}


@pytest.mark.parametrize("body, expected", cases(BAD_REWARDS, 2))
def test_a_bad_reward_ends_the_run_with_its_line_and_response(
    body, expected, trainer, folder, tmp_path, capsys, monkeypatch
):
    reward = tmp_path / "reward.py"
    reward.write_text(f"def compute_score(inputs):\n    {body}\n")
    options = dataclasses.replace(
        trainer.config.worker.reward, reward_function=f"{reward}:compute_score", timeout_s=2.0
    )

    with RewardManager(options) as manager:
        monkeypatch.setattr(trainer.sampling.collector.sampler, "reward", manager)
        status, told = run_with(trainer, folder, capsys, monkeypatch)

    assert status == 1
    assert told.startswith("the run failed in step 1: "), told
    assert all(part in told for part in [*expected, str(reward), "response: ", "ground_truth: "]), told
    assert told.endswith("\n\nno checkpoint was saved: `trainer.save_freq` says how often one is\n"), told


def test_ctrl_c_exits_130_with_one_line(trainer, folder, capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "fit", interrupted)

    assert run_with(trainer, folder, capsys, monkeypatch) == (
        130,
        "interrupted; no checkpoint was saved: `trainer.save_freq` says how often one is\n",
    )


def test_our_own_mistakes_keep_their_traceback(trainer, folder, capsys, monkeypatch):
    monkeypatch.setattr(trainer, "fit", lambda: int("nothing that a user wrote"))

    with pytest.raises(ValueError, match="invalid literal for int"):
        run_with(trainer, folder, capsys, monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(trainer):
    """A complete checkpoint of step 2."""
    trainer.run_state.step = 2
    trainer.run_state.save()
    trainer.run_state.flush()
    return trainer.run_state.saved


DAMAGE = {
    "a file that was cut off": (
        lambda actor: os.truncate(actor / "__0_0.distcp", 100),
        "has 100 bytes instead of",
    ),
    "a file that is gone": (lambda actor: (actor / "rank_1.pt").unlink(), "rank_1.pt is missing"),
    "a list of files that is gone": (lambda actor: (actor / "manifest.json").unlink(), "is not complete"),
    "a list of files that was cut off": (
        lambda actor: os.truncate(actor / "manifest.json", 20),
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage, expected", cases(DAMAGE, 2))
def test_a_damaged_checkpoint_is_told_before_anything_starts(
    damage, expected, checkpoint, folder, tmp_path, capsys
):
    copy = shutil.copytree(checkpoint, tmp_path / "global_step_2")
    damage(copy / "actor")

    assert main(arguments_for(folder, "text", f"trainer.load_checkpoint_path={copy}")) == 2

    told = capsys.readouterr().err
    assert f"{copy}/actor" in told and expected in told, told
    assert "no other checkpoint of the run is whole, so start over" in told


def test_a_failed_worker_shows_rank_phase_traceback_and_where_to_go_on(
    trainer, checkpoint, folder, capsys, monkeypatch
):
    monkeypatch.setattr(trainer, "train", lambda **_: trainer.workers.load_checkpoint("/no/checkpoint"))
    monkeypatch.setattr(trainer.run_state, "is_loaded", True)  # as in a later step

    status, told = run_with(trainer, folder, capsys, monkeypatch)

    assert status == 1
    assert "in phase `load_checkpoint`" in told
    assert "FileNotFoundError: no checkpoint folder /no/checkpoint/actor" in told
    assert told.count("traceback of rank") == 1 and "base_worker.py" in told
    assert "ray_trainer.py" not in told, "the controller's frames say nothing of the cause"
    assert told.endswith(f"the same command resumes from the last checkpoint, {checkpoint}\n"), told


def run_with(trainer, folder, capsys, monkeypatch):
    """Run the command with a trainer that is ready. Returns the exit status and what was told on stderr."""
    monkeypatch.setattr("verl.trainer.run.run_once.open_trainer", lambda *_: trainer)
    monkeypatch.setattr(trainer.run_state, "step", 0)
    capsys.readouterr()
    status = main(arguments_for(folder, "text"))
    return status, capsys.readouterr().err
