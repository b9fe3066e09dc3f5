# SPDX-License-Identifier: Apache-2.0
"""Only the file of a family knows a model by its name."""

import ast
import re

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.architecture.source import PACKAGE, source_files, tree_of
from verl.models.families.registry import LISTED, TYPES

HOMES = (
    *(
        "models/families/",
        "models/vila/",
        "models/tiny.py",
        "cli/tiny_model.py",
        "cli/init.py",
    ),  # recipes and their names
    *("agents/parsers/", "config/multi_turn.py"),  # formats of calls, named after models that write them
)
TYPES_OF_MODELS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *TYPES}
STEM = re.compile(r"qwen|gemma|llama|llava|mistral|glm|internvl|minicpm|kimi|deepseek|gpt_oss", re.IGNORECASE)


def names_in(source):
    """Lines and names of models in a module: as a whole string, or in a comparison."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docs and node.value in TYPES_OF_MODELS:
            yield node.lineno, node.value
        elif isinstance(node, ast.Compare):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and STEM.search(str(part.value)):
                    yield part.lineno, part.value


def test_no_module_but_a_familys_file_names_a_type_of_model():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in source_files()
        if not path.relative_to(PACKAGE).as_posix().startswith(HOMES)
        for line, name in names_in(ast.unparse(tree_of(path)))
    ]

    assert found == []


@pytest.mark.parametrize(
    "source", ['if config.model_type == "qwen2_vl": pass', 'X = {"llama": 1}', 'f("Qwen2" in name)']
)
def test_a_name_is_found_wherever_it_decides(source):
    assert list(names_in(source))


def test_each_type_belongs_to_one_family():
    names = [name for listed in LISTED for name in listed.model_types]

    assert len(names) == len(set(names)) == len(TYPES)
