# SPDX-License-Identifier: Apache-2.0
"""The pages for users of EasyR1, verl and Long-RL list every key with its meaning in the code."""

import json
import re

import pyarrow
import pyarrow.parquet
import yaml

from tests.architecture.migration import tables
from tests.architecture.source import ROOT, tree_of
from tests.contract.test_config_keys import SECTIONS
from verl.config.hints.renamed_keys import VERL_KEYS
from verl.config.parsing import yaml_text
from verl.config.ppo import DataConfig, PPOConfig
from verl.config.schema import walk_options
from verl.data.readers import load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.models.tiny import save_tiny_model
from verl.rewards.function import load_reward_function

FOLDER = ROOT / "docs" / "migration"
PAGES = {name: (FOLDER / f"{name}.md").read_text() for name in ("easyr1", "verl", "long_rl", "trl")}
ENTRIES = {entry.key: entry for entry in walk_options(PPOConfig)}
TICKED = re.compile(r"`([^`]+)`")
ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
LONG_RL_ADDS = {
    "data": "video_dir cache_dir vila_model diffusion is_omni audio_max_length num_workers",
    "worker": "vila_model is_omni",
    "worker.actor": "vila_model diffusion guidance_scale scheduler cached_embeds_dir kl_penalty",
    "worker.actor.optim": "warmup_style",
    "worker.ref": "vila_model diffusion guidance_scale scheduler cached_embeds_dir ulysses_size",
    "worker.rollout": "num_video_frames tokens_per_frame group_frames max_frames_vllm num_chunk_seq bs_vllm"
    " use_cached_embeds trust_remote_code"
    " audio_max_length open_ended_reward guidance_scale resolution num_steps kl_reward num_frames height"
    " width",
    "worker.reward": "reward_type diffusion",
    "trainer": "diffusion",
}
ALIASES = {
    f"{key.rpartition('.')[0]}.{entry.info.alias}": entry
    for key, entry in ENTRIES.items()
    if entry.info.alias
}
LONG_RL_KEYS = {f"{section}.{name}" for section, names in LONG_RL_ADDS.items() for name in names.split()}


def cells(text):
    """The cells of every row of a text's tables."""
    return [[cell.strip() for cell in row.split("|")] for row in ROW.findall(text)]


def status(key):
    """The support of a key, which is its column in the tables of the pages."""
    info = (ENTRIES | ALIASES)[key].info
    return "neutral" if info.unavailable else "inert" if info.inert else "works"


def test_the_tables_of_the_page_for_verl_are_generated():
    assert PAGES["verl"].endswith(tables()), "run `make config`"


def test_the_page_for_verl_names_every_repeated_section():
    repeated = yaml.safe_load(VERL_KEYS.file.read_text())["repeats"]

    assert [
        section for section in repeated if f"`{section}`" not in PAGES["verl"].split("## Every key")[1]
    ] == []


def test_the_defaults_listed_as_different_from_verls_are_those_of_the_code():
    rows = [row for row in cells(PAGES["verl"]) if len(row) == 4 and TICKED.fullmatch(row[0])]
    wrong = {
        row[0]: yaml_text(ENTRIES[row[0].strip("`")].default)
        for row in rows
        if row[2] != yaml_text(ENTRIES[row[0].strip("`")].default)
    }

    assert len(rows) >= 10
    assert wrong == {}


def test_every_key_of_easyr1_is_listed_by_its_support():
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


def test_the_python_names_that_easyr1s_users_import_exist():
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


def test_every_key_of_long_rl_is_listed_with_its_support():
    words = {"works": "works", "inert": "no effect", "neutral": "only "}
    known = ENTRIES | ALIASES
    rows = {row[0].strip("`"): row for row in cells(PAGES["long_rl"]) if row[0].strip("`") in known}

    assert set(rows) == LONG_RL_KEYS
    assert {key for key, row in rows.items() if not row[1].startswith(words[status(key)])} == set()
    neutral = {key for key in LONG_RL_KEYS if status(key) == "neutral"}
    assert {key for key in neutral if rows[key][1] != f"only {yaml_text(ENTRIES[key].default)}"} == set()


def test_every_option_of_trl_that_a_hint_knows_is_listed():
    names = yaml.safe_load((VERL_KEYS.file.parent / "other_names.yaml").read_text())["TRL"]

    assert cells(PAGES["trl"])[-len(names) :] == [
        [f"`{name}`", *in_full(entry)] for name, entry in names.items()
    ]


def in_full(entry):
    """The key of an option that a hint names by its end, or "none", and the remark."""
    option, _, remark = entry.partition("; ")
    ends = option.split(" | ")
    keys = [key for end in ends for key in ENTRIES if key == end or key.endswith(f".{end}")]
    return [f"`{keys[0]}`" if keys else option, remark]


def test_verls_rows_and_its_reward_function_work_as_they_are(tmp_path):
    (function,) = re.findall(r"```python\n(.*?)```", PAGES["verl"], flags=re.DOTALL)
    (tmp_path / "reward.py").write_text(function)
    (line,) = re.findall(r"```json\n(.*?)```", PAGES["verl"], flags=re.DOTALL)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line)]), tmp_path / "rows.parquet")
    config = DataConfig(answer_key="reward_model", filter_overlong_prompts_workers=1)
    model = save_tiny_model(tmp_path / "model")

    row = RLHFDataset(str(tmp_path / "rows.parquet"), load_tokenizer(model), None, config)[0]

    assert row["prompt_messages"][-1]["content"] == json.loads(line)["prompt"][-1]["content"]
    truth = json.loads(line)["reward_model"]["ground_truth"]
    reward = load_reward_function(f"{tmp_path / 'reward.py'}:compute_score")
    columns = {name: row[name] for name in ("ground_truth", "data_source", "extra_info")}
    right, wrong = reward.score([columns | {"response": f"#### {answer}"} for answer in (truth, "no")])
    assert (right["overall"], wrong["overall"]) == (1.0, 0.0)
    assert (right["acc"], wrong["acc"]) == (1.0, 0.0)
    assert columns["extra_info"] == json.loads(line)["extra_info"]
