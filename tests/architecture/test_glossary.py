# SPDX-License-Identifier: Apache-2.0
"""The words of docs/glossary.md are those of the code."""

import re

from tests.architecture.source import ROOT, source_files

ROWS = re.findall(
    r"^\| (.+?) \| .+ \| (.+?) \|$", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE
)


def test_every_name_of_the_glossary_is_one_of_the_code():
    source = "\n".join(path.read_text() for path in source_files())
    names = {name for _, named in ROWS for name in re.findall(r"`(\w+)`", named)}

    assert len(names) >= 30
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", source)) == []


def test_every_word_stands_once():
    words = [word for row, _ in ROWS for word in re.split(r"[,;] ", row)]

    assert sorted({word for word in words if words.count(word) > 1}) == []
