# SPDX-License-Identifier: Apache-2.0
"""The table of families agrees with their files, which are imported only for the models of a run."""

import pytest

from tests.architecture.shape import below
from verl.models.families import registry
from verl.models.families.generic import GenericFamily
from verl.models.families.interface import Family, MediaFamily, VisionFamily
from verl.models.families.qwen_vl import PatchGridFamily
from verl.models.families.registry import LISTED, all_families

FOLDER = "verl.models.families"
BASES = {MediaFamily, VisionFamily, PatchGridFamily, GenericFamily}
MODULES = {f"{FOLDER}.{listed.path.partition(':')[0]}" for listed in LISTED}


@pytest.mark.parametrize(
    ("listed", "family"), zip(LISTED, all_families(), strict=True), ids=[listed.path for listed in LISTED]
)
def test_a_row_says_what_the_class_declares(listed, family):
    assert listed.wholes == family.wholes


def test_every_class_but_the_bases_is_listed():
    all_families()
    found, waiting = set(), [Family]
    while waiting:
        waiting += waiting.pop().__subclasses__()
        found |= {cls for cls in waiting if cls.__module__.startswith(FOLDER)}

    assert {f"{cls.__module__.removeprefix(FOLDER + '.')}:{cls.__qualname__}" for cls in found - BASES} == {
        listed.path for listed in LISTED
    }


def test_the_table_imports_no_family_but_the_generic_one():
    assert below(registry.__name__) & MODULES == set()


def test_a_family_is_made_once():
    assert all(first is again for first, again in zip(all_families(), all_families(), strict=True))
