# SPDX-License-Identifier: Apache-2.0
"""The logger `push_to_hub.py`: a run that ends uploads its best checkpoint, to a local server here."""

import re
import shlex
import sys

import pytest
from huggingface_hub import metadata_load

from tests.helpers.fine_tuning import arguments_for, write_conversations
from tests.helpers.hub import Hub
from tests.helpers.training import QUICKSTART, ROOT, quickstart_arguments, read_metrics, start_training
from verl.checkpoint.manifest import write_manifest
from verl.checkpoint.tracker import CheckpointTracker, read_record
from verl.cli.merge import main as merge
from verl.config.trainer import RunConfig
from verl.logger.base import Run
from verl.logger.tracker import Tracker
from verl.models.tiny import save_tiny_model
from verl.trainer.command import check_run
from verl.trainer.sft import main as fine_tune

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

heavy = pytest.mark.heavy
LOGGER = f"{ROOT / 'examples' / 'logger' / 'push_to_hub.py'}:PushToHub"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_model(folder / "model", "qwen2")
    for name, seed in (("train", 1), ("val", 2)):
        write_questions(folder, name, 16, seed=seed, with_images=False)
        write_conversations(folder, name, 16, seed)
    return folder


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("PUSH_TO_HUB", "me/tiny")
    with Hub() as hub:
        hub.use_here(monkeypatch)
        yield hub


def run_of(output, *options, **how):
    arguments = [f"trainer.save_checkpoint_path={output}", f"trainer.logger=[console,file,{LOGGER}]"]
    return start_training(*options, *arguments, "trainer.n_gpus_per_node=1", **how)


@heavy
def test_a_run_uploads_its_best_checkpoint_with_a_card(folder, hub, tmp_path):
    arguments = quickstart_arguments(
        folder, folder / "model", "worker.rollout.name=hf", "trainer.max_steps=3", "trainer.val_freq=1",
        "trainer.save_freq=1", "worker.actor.optim.lr=0.003",
    )  # fmt: skip

    finished = run_of(tmp_path / "run", *arguments)

    assert finished.returncode == 0, finished.stderr[-6000:]
    best = read_record(tmp_path / "run").best_global_step
    exported = tmp_path / "run" / f"global_step_{best}" / "actor" / "huggingface"
    assert hub.private == {"me/tiny"} == hub.repositories.keys()
    assert hub.repositories["me/tiny"] == {file.name: file.read_bytes() for file in exported.iterdir()}
    assert f"uploaded to {hub.endpoint}/me/tiny" in finished.stderr and "finished 3 steps" in finished.stdout
    scores = {step: entry["val/reward_score"] for step, entry in read_metrics(tmp_path / "run").items()}
    card = (exported / "README.md").read_text()
    rows = [f"| {step} | {score:.4g} |" for step, score in scores.items() if step <= best]
    assert "\n".join(rows) + "\n\n" in card and "reward.py:compute_score" in card
    assert metadata_load(exported / "README.md")["library_name"] == "transformers"


@heavy
def test_a_failed_upload_leaves_the_export_and_a_command_that_repeats_it(folder, hub, tmp_path):
    hub.refuses = 403

    finished = run_of(tmp_path / "run", *arguments_for(folder, "trainer.max_steps=2"), main=fine_tune)

    assert finished.returncode == 0, finished.stderr[-6000:]
    told = next(line for line in finished.stderr.splitlines() if "not uploaded" in line)
    assert "out of storage" in told and "The run is complete" in told
    assert (tmp_path / "run/global_step_2/actor/huggingface/model.safetensors").is_file()
    hub.refuses = None
    program, *arguments = shlex.split(re.search(r"\S*verl-merge .*", told)[0])
    assert program.endswith("verl-merge") and merge(arguments) == 0
    assert "model.safetensors" in hub.repositories["me/tiny"]


@pytest.mark.parametrize(
    ("last_step", "failed", "exports"),
    [(2, False, True), (1, False, False), (2, True, False), (None, False, False)],
)
def test_only_a_run_that_has_finished_exports(hub, tmp_path, caplog, last_step, failed, exports):
    checkpoints = CheckpointTracker(tmp_path)
    actor = checkpoints.begin(2) / "actor"
    actor.mkdir()
    write_manifest(actor, {})
    write_manifest(actor.parent, {"step": 2})
    checkpoints.publish(2, 0.5)
    config = {"worker": {"actor": {"model": {"trust_remote_code": True, "family": None}}}}
    tracker = Tracker([LOGGER], Run("project", "first", tmp_path, config, total_steps=2))

    if last_step is not None:
        tracker.log({}, last_step)
    tracker.close(failed)

    assert ("exporting for the hub" in caplog.text) == exports
    command = f"verl-merge --local_dir {tmp_path}/global_step_2/actor --push-to-hub me/tiny"
    assert (f"{command} --trust_remote_code" in caplog.text) == exports  # there are no weights to export


@pytest.mark.parametrize(
    ("case", "told"),
    {
        "no repository": "`PUSH_TO_HUB` must name a hub repository as `OWNER/NAME`, got ''",
        "no owner": "`PUSH_TO_HUB` must name a hub repository as `OWNER/NAME`, got 'tiny'",
        "no token": "`PUSH_TO_HUB` needs a token of the hub: run `hf auth login`, or set `HF_TOKEN`",
        "no network": r"`PUSH_TO_HUB` \(me/tiny\): 127.0.0.1 cannot be reached: allow network",
    }.items(),
)
def test_what_is_in_the_way_of_the_upload_refuses_the_run_before_workers_start(
    hub, tmp_path, monkeypatch, case, told
):
    trainer = RunConfig(save_checkpoint_path=str(tmp_path), logger=("file", LOGGER), n_gpus_per_node=1)
    check_run(trainer)
    if case == "no repository":
        monkeypatch.delenv("PUSH_TO_HUB")
    elif case == "no owner":
        monkeypatch.setenv("PUSH_TO_HUB", "tiny")
    elif case == "no token":
        hub.forget_token(monkeypatch, tmp_path)
    else:
        hub.__exit__()

    with pytest.raises(ValueError, match=told):
        check_run(trainer)


def test_a_restarted_run_opens_its_loggers_without_the_hub(hub, tmp_path, caplog):
    hub.__exit__()

    Tracker([LOGGER], Run("project", "first", tmp_path, total_steps=2)).close()

    assert caplog.text == ""


def test_the_refusal_is_a_line_of_the_command_without_a_traceback(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PUSH_TO_HUB", raising=False)
    options = [f"trainer.save_checkpoint_path={tmp_path}", f"trainer.logger=[console,{LOGGER}]"]

    status = fine_tune([*arguments_for(folder), *options, "trainer.n_gpus_per_node=1"])

    told = capsys.readouterr().err
    assert status == 2 and "Traceback" not in told
    assert told.splitlines()[-1] == "`PUSH_TO_HUB` must name a hub repository as `OWNER/NAME`, got ''"
