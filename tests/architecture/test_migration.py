# SPDX-License-Identifier: Apache-2.0
"""The pages for users of EasyR1, verl and Long-RL: every key, and what it is here, as the code has it."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from tests.architecture.source import ROOT, tree_of
from tests.contract.test_config_keys import SECTIONS
from verl.config.ppo import DataConfig, PPOConfig
from verl.config.schema import walk_options
from verl.config.values import yaml_text
from verl.config.verl_keys import VERL_KEYS
from verl.data.rl_dataset import RLHFDataset
from verl.data.tokenizer import load_tokenizer
from verl.models.tiny import save_tiny_model
from verl.rewards.function import load_reward_function

FOLDER = ROOT / "docs" / "migration"
PAGES = {name: (FOLDER / f"{name}.md").read_text() for name in ("easyr1", "verl", "long_rl")}
ENTRIES = {entry.key: entry for entry in walk_options(PPOConfig)}
TICKED = re.compile(r"`([^`]+)`")
ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
# Sections of verl that repeat another one; the page says so in place of their rows.
REPEATED = {
    "actor_rollout_ref.ref.fsdp_config": (
        "actor_rollout_ref.actor.fsdp_config",
        "worker.actor.",
        "worker.ref.",
    ),
    "critic.fsdp": ("actor_rollout_ref.actor.fsdp_config", "worker.actor.", "worker.critic."),
    "critic.model.fsdp_config": ("actor_rollout_ref.actor.fsdp_config", "worker.actor.", "worker.critic."),
    "critic.model": ("actor_rollout_ref.model", "worker.actor.", "worker.critic."),
    "critic.optim": ("actor_rollout_ref.actor.optim", "worker.actor.", "worker.critic."),
    "reward.custom_reward_function": ("custom_reward_function", "", ""),
    "reward_model.reward_kwargs.overlong_buffer_cfg": ("reward_model.overlong_buffer", "", ""),
    "reward.reward_kwargs.overlong_buffer_cfg": ("reward_model.overlong_buffer", "", ""),
}
OWN_NOTE = {"worker.actor.ulysses_size", "worker.actor.use_torch_compile"}  # one for all models
# What stands once in verl's sections of the same kind, for it names another place.
NOT_REPEATED = {"custom_chat_template"}
LONG_RL_ADDS = {
    "data": "video_dir cache_dir vila_model diffusion is_omni audio_max_length num_workers",
    "worker": "vila_model is_omni",
    "worker.actor": "vila_model diffusion guidance_scale scheduler cached_embeds_dir",
    "worker.ref": "vila_model diffusion guidance_scale scheduler",
    "worker.rollout": "num_video_frames tokens_per_frame group_frames max_frames_vllm num_chunk_seq"
    " audio_max_length open_ended_reward guidance_scale resolution num_steps kl_reward num_frames height"
    " width",
    "worker.reward": "reward_type diffusion",
    "trainer": "diffusion",
}
LONG_RL_KEYS = {f"{section}.{name}" for section, names in LONG_RL_ADDS.items() for name in names.split()}


def cells(text):
    """The cells of every row of a text's tables."""
    return [[cell.strip() for cell in row.split("|")] for row in ROW.findall(text)]


def status(key):
    """What becomes of a key: the column of the pages' tables it stands in."""
    info = ENTRIES[key].info
    return "neutral" if info.unavailable else "inert" if info.inert else "works"


def repeated_section(key):
    """The section that repeats another one and holds a key, the longest of those that do."""
    holding = [section for section in REPEATED if key.startswith(f"{section}.")]
    return max(holding, key=len, default=None)


def row_of(key):
    there = VERL_KEYS.keys[key]
    return [f"`{key}`", f"`{there.option}`" if there.option else "none", there.note]


def verl_rows():
    """A row for each of verl's keys, but for sections that repeat another one."""
    return [row_of(key) for key in VERL_KEYS.keys if not repeated_section(key) or last(key) in NOT_REPEATED]


def last(key):
    return key.rpartition(".")[2]


@pytest.mark.parametrize("section", REPEATED)
def test_a_section_of_verl_that_is_said_to_repeat_another_does(section):
    original, ours, replaced = REPEATED[section]
    moved = {
        key.removeprefix(f"{section}."): there
        for key, there in VERL_KEYS.keys.items()
        if repeated_section(key) == section and last(key) not in NOT_REPEATED
    }
    expected = {
        key.removeprefix(f"{original}."): there
        if there.option is None or there.option in OWN_NOTE
        else there._replace(option=there.option.replace(ours, replaced, 1))
        for key, there in VERL_KEYS.keys.items()
        if key.startswith(f"{original}.") and last(key) not in NOT_REPEATED
    }

    assert moved == expected
    assert f"`{section}" in PAGES["verl"]


def test_the_page_for_verl_has_the_row_of_every_key_and_no_other():
    wanted = verl_rows()
    shown = [row for row in cells(PAGES["verl"].split("## Every key")[1]) if TICKED.fullmatch(row[0])]

    assert [row for row in wanted if row not in shown] == []
    assert [row for row in shown if row not in wanted] == []


def test_the_defaults_that_are_said_to_differ_from_verls_are_those_of_the_code():
    rows = [row for row in cells(PAGES["verl"]) if len(row) == 4 and TICKED.fullmatch(row[0])]
    wrong = {
        row[0]: yaml_text(ENTRIES[row[0].strip("`")].default)
        for row in rows
        if row[2] != yaml_text(ENTRIES[row[0].strip("`")].default)
    }

    assert len(rows) >= 10
    assert wrong == {}


def test_every_key_of_easyr1_stands_under_what_becomes_of_it():
    columns = {"works": 1, "inert": 2, "neutral": 3}
    shown = set()
    for sections, *rest in (
        row for row in cells(PAGES["easyr1"]) if len(row) == 4 and row[0].startswith("`")
    ):
        for section in TICKED.findall(sections):
            for kind, column in columns.items():
                shown |= {(f"{section}.{name}", kind) for name in TICKED.findall(rest[column - 1])}
    wanted = {f"{section}.{name}" for section, names in SECTIONS.items() for name in names} - LONG_RL_KEYS

    assert shown == {(key, status(key)) for key in wanted}


def test_the_python_names_that_easyr1s_users_import_are_there():
    (row,) = [row for row in cells(PAGES["easyr1"]) if row[0] == "Python"]
    names = [name.rpartition(".") for name in TICKED.findall(row[1])]
    defined = {
        (module, getattr(node, "name", None))
        for module, _, _ in names
        if (path := ROOT / (module.replace(".", "/") + ".py")).exists()
        for node in tree_of(path).body
    }

    assert len(names) >= 5
    wanted = [
        (module, name)
        for module, _, name in names
        if not (ROOT / module.replace(".", "/") / f"{name}.py").exists()
    ]
    assert [name for name in wanted if name not in defined] == []


def test_every_key_of_long_rl_stands_with_what_becomes_of_it():
    words = {"works": "works", "inert": "no effect", "neutral": "only "}
    rows = {row[0].strip("`"): row for row in cells(PAGES["long_rl"]) if row[0].strip("`") in ENTRIES}

    assert set(rows) == LONG_RL_KEYS
    assert {key for key, row in rows.items() if not row[1].startswith(words[status(key)])} == set()
    neutral = {key for key in LONG_RL_KEYS if status(key) == "neutral"}
    assert {key for key in neutral if rows[key][1] != f"only {yaml_text(ENTRIES[key].default)}"} == set()


def test_verls_rows_and_its_reward_function_work_with_the_adapter(tmp_path):
    (adapter,) = re.findall(r"```python\n(.*?)```", PAGES["verl"], flags=re.DOTALL)
    (tmp_path / "reward.py").write_text(adapter)
    (line,) = re.findall(r"```json\n(.*?)```", PAGES["verl"], flags=re.DOTALL)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line)]), tmp_path / "rows.parquet")
    config = DataConfig(answer_key="reward_model", filter_overlong_prompts_workers=1)
    model = save_tiny_model(tmp_path / "model")

    row = RLHFDataset(str(tmp_path / "rows.parquet"), load_tokenizer(model), None, config)[0]

    assert row["prompt_messages"][-1]["content"] == json.loads(line)["prompt"][-1]["content"]
    truth = json.loads(line)["reward_model"]["ground_truth"]
    reward = load_reward_function(f"{tmp_path / 'reward.py'}:score")
    columns = {name: row[name] for name in ("ground_truth", "data_source", "extra_info")}
    right, wrong = reward.score([columns | {"response": f"#### {answer}"} for answer in (truth, "no")])
    assert (right["overall"], wrong["overall"]) == (1.0, 0.0)
    assert (right["acc"], wrong["acc"]) == (1.0, 0.0)
    assert columns["extra_info"] == json.loads(line)["extra_info"]
