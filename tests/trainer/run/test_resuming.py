# SPDX-License-Identifier: Apache-2.0
"""A run resumes only with the rows and the model of its checkpoint, and says which options changed."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.fine_tuning import arguments_for, write_conversations
from verl.checkpoint.manifest import MANIFEST, write_manifest
from verl.checkpoint.tracker import CheckpointTracker, find_last_checkpoint
from verl.config.model import ModelConfig
from verl.config.schema import load_config
from verl.config.sft import SFTConfig
from verl.data.loader import make_sft_loaders
from verl.data.readers import load_readers, media_options
from verl.models.tiny import save_tiny_model
from verl.planning.auto_switches import recorded_options
from verl.planning.planned_run import planned_sft
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.trainer.prepare import PreparedRun
from verl.trainer.run.checkpointing import LOADER_FILE, ORIGIN, STATE_FILE
from verl.trainer.run.exit_status import BAD_INPUT
from verl.trainer.run.resuming import check_resume, model_digests, origin_of
from verl.trainer.run.run_once import run_once
from verl.trainer.setup import build_sft_trainer

ROWS = "sft_train.jsonl"


@pytest.fixture
def folder(tmp_path):
    """A model, its rows and the checkpoint of step 3 of a run on them."""
    (tmp_path / "images").mkdir()
    save_tiny_model(tmp_path / "model", "qwen2")
    write_conversations(tmp_path, "train", 32, seed=1)
    write_conversations(tmp_path, "val", 4, seed=2)
    config = config_for(tmp_path)
    tracker = CheckpointTracker(config.trainer.checkpoint_folder)
    step = tracker.begin(3)
    (step / "actor").mkdir()
    write_manifest(step / "actor", {})
    torch.save(loader_of(config).state_dict(), step / LOADER_FILE)
    origin = origin_of(config, planned_sft(config).models)
    (step / STATE_FILE).write_text(json.dumps({"step": 3, ORIGIN: origin}))
    write_manifest(step, {"step": 3})
    tracker.publish(3)
    return tmp_path


def config_for(folder, *options):
    run = f"trainer.save_checkpoint_path={folder / 'run'}"
    return load_config(SFTConfig, arguments_for(folder, run, *options))


def loader_of(config):
    model, data = config.worker.actor.model, config.data
    readers = load_readers(model, None, media_options(data, data), None)
    return make_sft_loaders(data, 16, readers, Path(config.trainer.checkpoint_folder)).train


def prepared(config):
    return PreparedRun(config, ResourcePool(1, 2, "cpu"))


def resume(config):
    check_resume(config, origin_of(config, planned_sft(config).models), loader_of(config))


def edit_rows(folder, edit):
    lines = (folder / ROWS).read_text().splitlines()
    (folder / ROWS).write_text("\n".join(edit(lines)) + "\n")


CHANGES = {
    "reordered": lambda lines: [lines[1], lines[0], *lines[2:]],
    "a question replaced": lambda lines: [lines[0].replace('"content": "', '"content": "So ', 1), *lines[1:]],
    "one less": lambda lines: lines[:-1],
}


def test_a_run_that_resumes_is_given_the_options_that_the_checkpoint_recorded(folder):
    key, newest = "worker.actor.model.compile_blocks", config_for(folder).trainer
    step = find_last_checkpoint(newest.checkpoint_folder)

    assert recorded_options(newest)[key] == "auto"
    assert recorded_options(replace(newest, find_last_checkpoint=False)) == {}
    named = replace(newest, find_last_checkpoint=False, load_checkpoint_path=str(step))
    assert recorded_options(named) == recorded_options(newest)
    (step / STATE_FILE).unlink()
    assert recorded_options(named) == {}  # the missing file is named later


@pytest.mark.parametrize("change", CHANGES)
def test_other_rows_are_refused_before_workers_start(folder, change):
    edit_rows(folder, CHANGES[change])
    config = config_for(folder)

    expected = "the inputs differ from those of the checkpoint"
    with pytest.raises(ValueError, match=expected) as refused, ExitStack() as stack:
        build_sft_trainer(prepared(config), stack)  # workers need Ray, which is not there

    assert f"{folder / 'run' / 'global_step_3'}" in str(refused.value)
    assert f"`data.train_files` was {folder / ROWS} and is {folder / ROWS}, whose rows differ" in str(
        refused.value
    )
    assert ("num_rows 32 then, 31 now" in str(refused.value)) == (change == "one less")
    assert "`trainer.allow_changed_inputs=true`" in str(refused.value)


def test_the_same_rows_in_another_file_and_place_are_accepted(folder):
    shutil.move(folder / ROWS, folder / "moved.jsonl")

    resume(config_for(folder, f"data.train_files={folder / 'moved.jsonl'}"))


def test_changed_inputs_that_are_allowed_are_a_warning(folder, caplog):
    edit_rows(folder, CHANGES["reordered"])

    with caplog.at_level("WARNING"):
        resume(config_for(folder, "trainer.allow_changed_inputs=true"))

    assert "resuming with changed inputs: `data.train_files` was" in caplog.text


COUNTING = """
from verl.data.order import RowSampler

class Counting(RowSampler):
    next = 0
    def draw(self, count):
        self.next += count
        return [(self.next - left) % 32 for left in range(count, 0, -1)]
    def state_dict(self): return {"next": self.next}
    def load_state_dict(self, state): self.next = state["next"]
"""


def test_a_sampler_that_does_not_load_its_state_is_refused_before_workers_start(folder):
    configs = []
    for name, code in (("then", COUNTING), ("now", COUNTING.replace('"next"', '"row"'))):
        (folder / name).mkdir()
        (folder / name / "counting.py").write_text(code)
        configs.append(config_for(folder, f"data.sampler={folder / name}/counting.py:Counting"))
    step = folder / "run" / "global_step_3"
    torch.save(loader_of(configs[0]).state_dict(), step / LOADER_FILE)
    origin = origin_of(configs[0], planned_sft(configs[0]).models)
    (step / STATE_FILE).write_text(json.dumps({"step": 3, ORIGIN: origin}))
    (step / MANIFEST).unlink()
    write_manifest(step, {"step": 3})

    resume(configs[0])
    with pytest.raises(ValueError) as refused, ExitStack() as stack:
        build_sft_trainer(prepared(configs[1]), stack)  # workers need Ray, which is not there

    assert str(refused.value).startswith(
        f"`data.sampler` (counting.py:Counting) cannot load its state of {step}: KeyError('row'). Restore the"
        " file to resume; or start a new run with `trainer.find_last_checkpoint=false`"
    )


def change_config(model):
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"rope_theta": 1234.0}))


def change_a_weight(model):
    weights = load_file(model / "model.safetensors")
    first = sorted(weights)[0]
    weights[first].view(-1)[0] += 1
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("change", "part"), [(change_config, "config"), (change_a_weight, "weights")])
def test_another_model_is_refused_by_both_names(folder, change, part):
    shutil.copytree(folder / "model", folder / "other")
    other = [f"worker.actor.model.model_path={folder / 'other'}"]
    resume(config_for(folder, *other))  # a copy is the same model
    change(folder / "other")

    with pytest.raises(ValueError) as refused:
        resume(config_for(folder, *other))

    paths = f"was {folder / 'model'} and is {folder / 'other'}, whose {part} differs"
    assert f"`worker.actor.model.model_path` {paths}" in str(refused.value)


def test_a_models_digest_does_not_depend_on_how_its_weights_are_spread_over_files(tmp_path):
    model = save_tiny_model(tmp_path / "model", "qwen2")
    config = ModelConfig(model_path=str(model))
    before = model_digests(config)
    weights = load_file(model / "model.safetensors")
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, model / "a.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, model / "b.safetensors")
    (model / "model.safetensors").unlink()

    assert model_digests(config) == before


def test_a_damaged_weight_file_is_left_to_the_workers_which_name_it(folder):
    (folder / "model" / "model.safetensors").write_bytes(b"cut off")

    assert model_digests(ModelConfig(model_path=str(folder / "model")))["weights"] is None
    resume(config_for(folder))


def test_a_refused_resume_never_advises_the_same_command(folder, monkeypatch):
    edit_rows(folder, CHANGES["reordered"])
    config = config_for(folder)
    monkeypatch.setattr("verl.trainer.run.run_once.prepare_run", lambda *_, **__: prepared(config))

    end = run_once(config)

    assert end.status == BAD_INPUT and not end.retryable
    assert "the same command" not in end.message


def test_a_resumed_run_lists_the_options_that_changed_and_can_matter(folder, caplog):
    options = [
        "worker.actor.optim.lr=5e-4",
        "data.seed=1",
        "trainer.max_restarts=3",
        "trainer.logger=[console]",
        "trainer.console=json",
    ]

    with caplog.at_level("INFO"):
        resume(config_for(folder, *options[:1], *options[2:]))

    assert caplog.text.endswith("\n  worker.actor.optim.lr: 0.001 -> 0.0005\n")
    with pytest.raises(ValueError, match="whose rows differ: seed 1 then, 2 now"):
        resume(config_for(folder, "data.seed=2"))


def test_a_checkpoint_without_records_resumes_as_before(folder):
    step = folder / "run" / "global_step_3"
    state = torch.load(step / LOADER_FILE, weights_only=True)
    del state["rows"]
    torch.save(state, step / LOADER_FILE)
    (step / STATE_FILE).write_text(json.dumps({"step": 3}))
    (step / MANIFEST).unlink()
    write_manifest(step, {"step": 3})
    edit_rows(folder, CHANGES["reordered"])
    change_config(folder / "model")

    resume(config_for(folder))


def test_a_changed_file_of_an_extension_is_told_with_its_option(folder, caplog):
    path = folder / "own.py"
    path.write_text("def half(position, config):\n    return 0.5\n")
    own = f"worker.actor.optim.lr_scheduler_type={path}:half"
    state = folder / "run" / "global_step_3" / STATE_FILE
    config = config_for(folder, own)
    state.write_text(json.dumps({"step": 3, ORIGIN: origin_of(config, planned_sft(config).models)}))
    (state.parent / MANIFEST).unlink()
    write_manifest(state.parent, {"step": 3})

    with caplog.at_level("WARNING"):
        resume(config)
    assert "changed" not in caplog.text
    path.write_text("def half(position, config):\n    return 0.4\n")
    with caplog.at_level("WARNING"):
        resume(config)

    assert "a file of the run changed since the checkpoint" in caplog.text
    assert f"`worker.actor.optim.lr_scheduler_type` ({path}:half)" in caplog.text
