# SPDX-License-Identifier: Apache-2.0
"""`--dry-run` plans as the run would, and says why a model has no plan."""

import json
from pathlib import Path

import pytest

from verl.checkpoint.manifest import ORIGIN, STATE_FILE
from verl.checkpoint.tracker import TRACKER
from verl.trainer.main import main
from verl.trainer.run.exit_status import BAD_INPUT

ROOT = Path(__file__).parents[3]
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SMALL = ["data.rollout_batch_size=16", "worker.actor.global_batch_size=16", "worker.rollout.n=2"]
RECOMPUTE = "worker.actor.model.enable_gradient_checkpointing"


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Plan a run on eight H100 of a model that is only a config; returns exit status and all output."""
    monkeypatch.chdir(ROOT)

    def plan(config, *options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        given = [f"worker.actor.model.model_path={tmp_path}", f"trainer.save_checkpoint_path={tmp_path}/run"]
        status = main(
            ["config=examples/config.yaml", *given, *SMALL, *options, "--dry-run", "--on", "8xH100"]
        )
        found = capsys.readouterr()
        return status, found.out + found.err

    return plan


def record(folder, options):
    """Write what is read of a checkpoint of step 3."""
    step = folder / "global_step_3"
    step.mkdir(parents=True)
    (folder / TRACKER).write_text(json.dumps({"last_global_step": 3}))
    (step / STATE_FILE).write_text(json.dumps({"step": 3, ORIGIN: {"options": options}}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "of_tomorrow"}, "does not recognize this architecture"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int"),
        ({"layer_types": ["of_tomorrow"] * 2}, "`layer_types` entries must be in"),
    ],
)
def test_a_model_whose_config_cannot_be_read_is_named_with_the_reason(dry_run, changes, reason, tmp_path):
    status, text = dry_run(QWEN | changes)

    assert status == BAD_INPUT
    assert f"`worker.actor.model.model_path` ({tmp_path}): no model config can be read there: " in text
    assert reason in text


def test_weights_that_another_cluster_may_have_are_a_note(dry_run, tmp_path):
    status, text = dry_run(QWEN)

    assert status == 0
    assert f"note: `worker.actor.model.model_path` ({tmp_path}) has no weights such as" in text
    assert f"auto: {RECOMPUTE}=false\n" in text


def test_the_choices_are_those_of_the_checkpoint_that_the_run_would_resume_from(dry_run, tmp_path):
    record(tmp_path / "run", {RECOMPUTE: 0.5})

    assert f"auto: {RECOMPUTE}=0.5 (as in the checkpoint)\n" in dry_run(QWEN)[1]
    assert f"auto: {RECOMPUTE}=false\n" in dry_run(QWEN, "trainer.find_last_checkpoint=false")[1]


def test_a_plan_moves_no_checkpoint_to_where_it_belongs(dry_run, tmp_path):
    record(tmp_path / "run", {})
    (tmp_path / "run/global_step_3").rename(tmp_path / "run/global_step_3.tmp")

    assert dry_run(QWEN)[0] == 0
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["global_step_3.tmp"]


def test_a_damaged_record_of_checkpoints_is_named(dry_run, tmp_path):
    record(tmp_path / "run", {})
    (tmp_path / "run" / TRACKER).write_text("{")
    status, text = dry_run(QWEN)

    assert status == BAD_INPUT
    assert f"{tmp_path}/run/{TRACKER} cannot be read" in text
