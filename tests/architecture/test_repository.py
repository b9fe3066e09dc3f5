# SPDX-License-Identifier: Apache-2.0
"""The tree of folders in docs/repository.md is the tree."""

import re

from tests.architecture.source import ROOT, source_files

FOLDER = re.compile(r"[\w.]+/")


def tree():
    text = (ROOT / "docs" / "repository.md").read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    return next(block for block in blocks if block.startswith("verl/"))


def named_folders():
    return {name.rstrip("/") for name in FOLDER.findall(tree())}


def test_the_tree_names_every_folder_of_the_package():
    packages = {path.parent.name for path in source_files(pattern="__init__.py")}

    assert packages - named_folders() - {"ray"} == set()


def test_the_tree_names_nothing_that_is_not_there():
    files = source_files(ROOT, "*")

    assert named_folders() - {parent.name for path in files for parent in path.parents} == set()
