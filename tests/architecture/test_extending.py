# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/extending.md run as they stand, and what the page says is to be touched is there."""

import re
from typing import get_type_hints

import pytest

from tests.architecture.source import ROOT
from verl import batch_keys
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.data import files as data_files
from verl.logger.tracker import LOGGERS
from verl.models.families.interface import Family, MediaFamily
from verl.optim.build import OPTIMIZERS
from verl.workers.rollout.engines import ROLLOUT_ENGINES
from verl.workers.rollout.interface import RolloutEngine

PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
BLOCKS = {
    title: block
    for title, body in SECTIONS.items()
    for block in re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL)
}
REGISTRIES = (ADV_ESTIMATORS, POLICY_LOSSES, KL_ESTIMATORS, OPTIMIZERS, LOGGERS, ROLLOUT_ENGINES)
TABLES = (
    (batch_keys, "BATCH_KEYS"),
    (data_files, "READERS"),
)


@pytest.fixture(autouse=True)
def what_a_block_adds_goes_again(monkeypatch):
    for one in REGISTRIES:
        monkeypatch.setattr(one, "_functions", dict(one._functions))
    for module, name in TABLES:
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


def run(title):
    """Run the block of a section; return the names that it defined."""
    names = {}
    exec(compile(BLOCKS[title], f"docs/extending.md, {title}", "exec"), names)
    return names


def test_every_section_has_one_block():
    assert list(BLOCKS) == list(SECTIONS)
    assert PAGE.count("```python") == len(BLOCKS)


@pytest.mark.parametrize("title", BLOCKS)
def test_the_block_of_a_section_runs_and_what_it_asserts_holds(title):
    assert "assert" in BLOCKS[title]
    run(title)


def test_the_engine_of_the_page_has_every_member_of_an_engine():
    members = {name for name in vars(RolloutEngine) if not name.startswith("_")} | set(
        get_type_hints(RolloutEngine)
    )
    engine = run("A rollout engine")["EchoEngine"]

    assert {name for name in members if not hasattr(engine, name)} == set()


@pytest.mark.parametrize("title", SECTIONS)
def test_what_a_section_touches_and_its_tests_are_there(title):
    named = set(re.findall(r"`((?:verl|tests)/[\w./]+)`", SECTIONS[title]))

    assert "**Touch**" in SECTIONS[title] or title == "A metric"
    assert "**Test**" in SECTIONS[title]
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_the_map_of_media_families_has_every_method_and_stars_the_abstract_ones():
    rows = re.findall(
        r"^\|.*\| (`\w+`\*?(?:, `\w+`\*?)*) \|", SECTIONS["A vision-language model"], re.MULTILINE
    )
    named = [name for row in rows for name in row.split(", ")]
    methods, inherited = (
        {name for name, value in vars(cls).items() if callable(value) or isinstance(value, property)}
        for cls in (MediaFamily, Family)
    )
    names = {name.strip("`*") for name in named}

    assert len(names) == len(named)
    assert {name for name in methods if name[0] != "_"} <= names <= methods | inherited
    assert {name.strip("`*") for name in named if name.endswith("*")} == MediaFamily.__abstractmethods__


def test_every_section_is_in_the_table():
    linked = re.findall(r"^\| \[(.+?)\]\(#", PAGE, flags=re.MULTILINE)

    assert [title[0].lower() + title[1:] for title in SECTIONS] == linked
