# SPDX-License-Identifier: Apache-2.0
"""Paths, modules and numbers in the documentation are those of the code."""

import re

import pytest

from tests.architecture.source import PACKAGE, ROOT
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.trainer.extensions.checks import KINDS

NOW = [  # pages about the present: a log and a changelog name what was
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt", "benchmarks/README.md")
    ),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"),
]
FOREIGN = ("verl.md", "easyr1.md", "long_rl.md")  # pages that name modules of other projects
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|sh|yaml|jinja|html|toml|ipynb)")
FOLDER = re.compile(r"[\w-]+(?:/[\w-]+)*/")
MODULE = re.compile(r"verl(?:\.\w+)+")
NUMBERS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
)
COUNTS = {  # what is counted: how many there are
    r"(?:advantage )?estimators": len(ADV_ESTIMATORS.names()),
    r"(?:policy )?losses": len(POLICY_LOSSES.names()),
    r"kinds\]?(?:\([\w./]+\))? of \[?(?:extensions|functions and classes)": len(KINDS),
}
COUNTED = {what: re.compile(rf"\[?\b(\d+|{'|'.join(NUMBERS)}) \[?({what})") for what in COUNTS}


def text_of(path):
    return path.read_text(encoding="utf-8")


def exists(name):
    """True for a path of the repository, whole or inside the package, and for one in a user's folder."""
    top = name.split("/")[0]
    bases = [base for base in (ROOT, PACKAGE) if (base / top).is_dir()]
    return not bases or any((base / name).exists() for base in bases)


def is_name(name):
    """True for a module of the package, and for a name in one."""
    folder, rest = ROOT, name.split(".")
    while rest and (folder / rest[0]).is_dir():
        folder, *rest = folder / rest[0], *rest[1:]
    file = folder / f"{rest[0]}.py" if rest else folder
    if rest and not file.exists():
        file = folder / "__init__.py"
    else:
        rest = rest[1:]
    return not rest or re.search(rf"\b{rest[0]}\b", text_of(file)) is not None


@pytest.mark.parametrize("path", NOW, ids=lambda path: path.name)
def test_every_path_in_quotes_is_there(path):
    quoted = {name for text in QUOTED.findall(text_of(path)) for name in (text, *text.split())}
    named = {name for name in quoted if FILE.fullmatch(name) or FOLDER.fullmatch(name)}

    assert sorted(name for name in named if not exists(name)) == []


@pytest.mark.parametrize(
    "path", [path for path in NOW if path.name not in FOREIGN], ids=lambda path: path.name
)
def test_every_module_in_quotes_is_there(path):
    named = {name for text in QUOTED.findall(text_of(path)) for name in MODULE.findall(text)}

    assert sorted(name for name in named if not is_name(name)) == []


@pytest.mark.parametrize("path", NOW, ids=lambda path: path.name)
def test_every_number_of_algorithms_and_extensions_is_that_of_the_registry(path):
    wrong = [
        found[0]
        for what, pattern in COUNTED.items()
        for found in pattern.finditer(text_of(path))
        if COUNTS[what] != (NUMBERS.index(found[1]) if found[1] in NUMBERS else int(found[1]))
    ]

    assert wrong == []


def test_the_patterns_find_what_they_hold():
    readme = text_of(ROOT / "README.md")

    assert all(pattern.search(readme) for pattern in COUNTED.values())
    assert is_name("verl.trainer.main") and is_name("verl.protocol.DataProto") and not is_name("verl.nothing")
    assert exists("verl/protocol.py") and exists("trainer/ray_trainer.py") and exists("my/reward.py")
    assert not exists("verl/nothing.py")
