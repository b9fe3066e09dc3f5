# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from verl.config.hints.renamed_keys import MAX_DEPTH, VERL_KEYS
from verl.config.ppo import PPOConfig
from verl.config.schema import walk_options
from verl.trainer.main import main

OPTION = re.compile(r"`((?:data|algorithm|worker|trainer)(?:\.\w+)+)")
ENTRIES = {entry.key: entry for entry in walk_options(PPOConfig)}
MAPPINGS = tuple(f"{key}." for key, entry in ENTRIES.items() if isinstance(entry.default, dict))


def is_option(key):
    return key in ENTRIES or key.startswith(MAPPINGS)


def test_every_key_of_verl_has_an_option_or_a_reason():
    moved = VERL_KEYS.keys

    assert {
        key: there.option for key, there in moved.items() if there.option and not is_option(there.option)
    } == {}
    assert [key for key, there in moved.items() if there.option is None and not there.note] == []


def test_no_entry_is_deeper_than_the_lookup():
    assert max(key.count(".") + 1 for key in VERL_KEYS.keys) <= MAX_DEPTH


def test_no_key_of_the_table_is_an_option_here():
    assert [key for key in VERL_KEYS.keys if is_option(key)] == []


def test_the_remarks_name_options_that_exist_and_are_single_clauses():
    notes = {there.note for there in VERL_KEYS.keys.values()}

    assert sorted({key for note in notes for key in OPTION.findall(note) if not is_option(key)}) == []
    assert [note for note in notes if note.endswith(".") or "\n" in note] == []


def test_a_command_of_verl_is_answered_with_the_command_here(capsys):
    # The main options of verl's GRPO example on GSM8K.
    status = main(
        [
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=1024",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            "actor_rollout_ref.actor.fsdp_config.param_offload=False",
            "actor_rollout_ref.rollout.n=5",
            "trainer.test_freq=5",
            "--dry-run",
        ]
    )

    assert status == 2
    printed = capsys.readouterr().err
    for theirs, ours in (
        ("data.train_batch_size", "data.rollout_batch_size"),
        ("actor_rollout_ref.actor.optim.lr", "worker.actor.optim.lr"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "worker.actor.global_batch_size"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "worker.actor.offload.offload_params"),
        ("actor_rollout_ref.rollout.n", "worker.rollout.n"),
        ("trainer.test_freq", "trainer.val_freq"),
    ):
        assert f"`{theirs}` is verl's name for `{ours}`" in printed
    assert "`worker.rollout.n` must be" not in printed  # it was given, under verl's name


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns", "actor_rollout_ref.rollout.multi_turn"),
        ("critic.optim._target_", "*._target_"),
        ("reward_model.model.path", "reward_model.model.path"),
        ("reward_model.model.input_tokenizer", "reward_model.model"),
        ("+reward_model.overlong_buffer.len", "reward_model.overlong_buffer.len"),
        ("data.train_files", None),
    ],
)
def test_a_key_is_found_by_itself_by_its_section_or_by_its_name(key, entry):
    assert VERL_KEYS.find(key) == entry
