# SPDX-License-Identifier: Apache-2.0
"""The card of an exported model says what its run recorded, and nothing else."""

import json
from pathlib import Path

import pytest
from huggingface_hub import metadata_load

from verl.checkpoint.export_files import OURS, write_card
from verl.checkpoint.manifest import MANIFEST, ORIGIN, STATE_FILE
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.config.sft import SFTConfig
from verl.logger.base import Run
from verl.logger.file import FileLogger
from verl.trainer.run.resuming import origin_of
from verl.utils.typed_command import version_text

REWARD = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "reward.py"


BASE = "Qwen/Qwen2.5-0.5B-Instruct"


def make_run(root, scores, *options, step=20, config_class=PPOConfig, base=BASE):
    """Write the files that a run leaves, without its weights; return the policy's folder of a checkpoint."""
    actor = root / "run" / f"global_step_{step}" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    paths = [f"worker.actor.model.model_path={base}", "data.val_files=a/held_out"]
    config = load_config(config_class, [*paths, *options])
    (actor.parent / STATE_FILE).write_text(json.dumps({"step": step, ORIGIN: origin_of(config, [])}))
    (actor / MANIFEST).write_text(json.dumps({"base_model": str(base)}))
    logger = FileLogger(Run("project", "first", root / "run"))
    for number, metrics in scores.items():
        logger.log(metrics, number)
    return actor


def card_of(actor, **how):
    write_card(actor, actor / "huggingface", **how)
    return (actor / "huggingface" / "README.md").read_text()


RL = (
    *("data.train_files=[openai/gsm8k/main@train,hiyouga/math12k@train]", "trainer.experiment_name=first"),
    *(f"worker.reward.reward_function={REWARD}:compute_score", "worker.actor.model.lora.rank=16"),
    *("data.rollout_batch_size=8", "worker.actor.global_batch_size=4", "worker.rollout.n=4"),
    "trainer.n_gpus_per_node=2",
)
SCORES = {0: 0.125, 5: 0.34, 10: 0.6944444, 20: 0.868, 30: 0.9}


def test_a_card_says_what_the_run_recorded_up_to_the_step_of_the_checkpoint(tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1 + 1"}\n')
    held_out = f"data.val_files={tmp_path / 'held_out.jsonl'}"
    scores = {step: {"val/reward_score": score, "actor/pg_loss": 1.0} for step, score in SCORES.items()}

    card = card_of(make_run(tmp_path, scores | {7: {"actor/pg_loss": 0.5}}, *RL, held_out))

    assert (
        card
        == f"""---
base_model: "{BASE}"
datasets: ["openai/gsm8k", "hiyouga/math12k"]
library_name: transformers
tags: [verl, reinforcement-learning]
---

# first

{OURS}

[{BASE}](https://huggingface.co/{BASE}) after 20 steps of reinforcement learning.

| | |
|---|---|
| training data | `openai/gsm8k/main@train`, `hiyouga/math12k@train` |
| held-out data | `held_out.jsonl` |
| reward function | `reward.py:compute_score` |
| advantage estimator | `grpo` |
| prompts per step | `8` |
| responses per prompt | `4` |
| batch per update | `4` |
| learning rate | `1e-06` |
| LoRA rank | `16` |

Held-out `val/reward_score`: 0.125 before training, 0.868 at step 20.

| step | `val/reward_score` |
|---|---|
| 0 | 0.125 |
| 5 | 0.34 |
| 10 | 0.6944 |
| 20 | 0.868 |

The command, with the options that are not at their defaults (without mappings; of local paths the last part):

```bash
verl-train \\
  'data.train_files=[openai/gsm8k/main@train, hiyouga/math12k@train]' \\
  data.val_files=held_out.jsonl \\
  data.rollout_batch_size=8 \\
  worker.actor.global_batch_size=4 \\
  worker.actor.model.model_path={BASE} \\
  worker.actor.model.tokenizer_path={BASE} \\
  worker.actor.model.lora.rank=16 \\
  worker.rollout.n=4 \\
  worker.reward.reward_function=reward.py:compute_score \\
  trainer.experiment_name=first \\
  trainer.n_gpus_per_node=2 \\
  trainer.save_checkpoint_path=first
```

Exported with {version_text()}.
"""
    )


def test_a_card_of_fine_tuning_has_the_loss_and_says_when_it_was_first_validated(tmp_path):
    losses = {4: {"val/loss": 2.5}, 8: {"val/loss": 1.25}, 9: {"train/loss": 1.0}}

    card = card_of(make_run(tmp_path, losses, "data.train_files=a/b", step=9, config_class=SFTConfig))

    assert "after 9 steps of supervised fine-tuning." in card
    assert "Held-out `val/loss`: 2.5 at step 4, 1.25 at step 8.\n" in card
    assert "advantage" not in card and "reward" not in card


def test_a_single_score_is_given_once_and_one_of_zero_is_a_score(tmp_path):
    card = card_of(make_run(tmp_path, {4: {"val/reward_score": 0.0}}, *RL))

    assert "Held-out `val/reward_score`: 0 at step 4.\n" in card and "| 4 | 0 |\n" in card


def test_a_card_shows_no_folders_of_the_machine_and_no_mappings_which_may_hold_keys(tmp_path):
    kwargs = "worker.reward.reward_function_kwargs={api_key: sk-secret}"

    card = card_of(make_run(tmp_path, {}, *RL, kwargs, f"trainer.save_checkpoint_path={tmp_path}/run"))

    assert "worker.rollout.n=4" in card and "sk-secret" not in card and str(tmp_path) not in card


def test_names_with_signs_of_markdown_keep_the_title_the_table_and_the_command_whole(tmp_path):
    (tmp_path / "a|b `c`\nd.jsonl").write_text('{"prompt": "1 + 1"}\n')
    held_out = f"data.val_files=['{tmp_path}/a|b `c`\\nd.jsonl', 'owner/rows']".replace("'", '"')

    card = card_of(make_run(tmp_path, {}, *RL, held_out, 'trainer.experiment_name="first\\n# ```"'))

    assert "\n\n# first # ```\n\n" in card
    assert "| held-out data | ``` a\\|b `c` d.jsonl ```, `owner/rows` |\n" in card
    command = card.partition("(without mappings")[2]
    fence = "`" * 9  # the command has 8: 2 in the file, 3 in the name, 3 in the folder of that name
    assert command.count(f"\n{fence}bash\n") == 1 and command.count(f"\n{fence}\n") == 1


def test_the_data_sets_of_a_card_are_names_of_the_hub(tmp_path):
    files = "data.train_files=['openai/gsm8k:main@train', 'openai/gsm8k/main', 'a/b@x']".replace("'", '"')

    card_of(make_run(tmp_path, {}, *RL, files))

    front = metadata_load(tmp_path / "run/global_step_20/actor/huggingface/README.md")
    assert front["datasets"] == ["openai/gsm8k", "a/b"]


@pytest.mark.parametrize("scores", [{}, {3: {"val/reward_score": float("nan")}}])
def test_without_scores_there_is_no_curve(tmp_path, scores):
    actor = make_run(tmp_path, scores, *RL)
    if not scores:
        (tmp_path / "run" / "experiment_log.jsonl").unlink(missing_ok=True)

    card = card_of(actor)

    assert "LoRA rank" in card and "Held-out `val" not in card and "| step |" not in card


def test_a_long_curve_keeps_a_dozen_rows_and_both_ends(tmp_path):
    scores = {step: {"val/reward_score": step / 1000} for step in range(101)}

    card = card_of(make_run(tmp_path, scores, *RL, step=100))

    rows = card.partition("| step |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows[0] == "| 0 | 0 |" and rows[1] == "| 9 | 0.009 |" and rows[-1] == "| 100 | 0.1 |"
    assert len(rows) == 13


@pytest.mark.parametrize("damaged", [False, True])
def test_the_license_and_the_origin_of_a_local_base_are_those_of_its_card(tmp_path, damaged):
    base = tmp_path / "private" / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    front = "license: other\nlicense_name: qwen\nbase_model: Qwen/Qwen3-4B\ntags: [x]"
    (base / "README.md").write_text(f"---\n{'a: b: c' if damaged else front}\n---\n\n# Base\n")

    card = card_of(make_run(tmp_path, {}, *RL, base=base))

    front = metadata_load(tmp_path / "run/global_step_20/actor/huggingface/README.md")
    assert front.get("license") == (None if damaged else "other")
    assert front.get("license_name") == (None if damaged else "qwen")
    assert front.get("base_model") == (None if damaged else "Qwen/Qwen3-4B")
    assert "`base` after 20 steps" in card and str(tmp_path) not in card


def test_a_card_that_the_user_wrote_stays_and_our_own_is_replaced(tmp_path):
    actor = make_run(tmp_path, {}, *RL)
    first = card_of(actor)
    assert "| 0 |" not in first

    FileLogger(Run("project", "first", tmp_path / "run")).log({"val/reward_score": 0.5}, 0)
    assert "| 0 | 0.5 |" in card_of(actor)

    (actor / "huggingface" / "README.md").write_text("# By hand\n")
    assert card_of(actor) == "# By hand\n"


def test_other_roles_and_pipelines_are_named(tmp_path):
    actor = make_run(tmp_path, {}, *RL)
    critic = actor.rename(actor.with_name("critic"))
    (critic / "huggingface" / "model_index.json").write_text("{}")

    card = card_of(critic)

    assert "of reinforcement learning: the `critic` of the run." in card
    assert "library_name: diffusers" in card and "LoRA" not in card


def test_a_checkpoint_that_records_nothing_gets_no_more_than_its_base(tmp_path):
    actor = tmp_path / "actor"  # as copied from the folder of another trainer
    (actor / "huggingface").mkdir(parents=True)

    assert card_of(actor, base_model="Qwen/Qwen3-4B").splitlines()[:3] == [
        "---", 'base_model: "Qwen/Qwen3-4B"', "library_name: transformers",
    ]  # fmt: skip
    (actor / "huggingface" / "README.md").unlink()
    lines = card_of(actor).splitlines()
    assert lines[-5:] == [OURS, "", "A model.", "", f"Exported with {version_text()}."]
