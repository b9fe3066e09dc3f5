# SPDX-License-Identifier: Apache-2.0
"""The file tree in the README is the tree."""

import re

from tests.architecture.source import PACKAGE, ROOT, source_files

FILE_NAME = re.compile(r"[\w.]+\.(?:py|sh|jinja|yaml)\b")


def test_the_readme_names_every_module():
    text = (ROOT / "README.md").read_text()
    names = set(FILE_NAME.findall(text))

    missing = [
        str(path.relative_to(ROOT))
        for path in source_files(PACKAGE)
        if path.name != "__init__.py" and path.name not in names
    ]
    assert not missing, "not in README.md:\n" + "\n".join(missing)


def test_the_readme_tree_names_nothing_that_is_not_there():
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    tree = next(block for block in blocks if "protocol.py" in block)
    existing = {path.name for path in source_files(ROOT, "*")}

    assert not set(FILE_NAME.findall(tree)) - existing
