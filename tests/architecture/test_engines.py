# SPDX-License-Identifier: Apache-2.0
"""The page on rollout engines says what tests show."""

import ast

from tests.architecture.engines import ABILITIES, PAGE, TESTS, with_tables


def test_the_tables_of_the_page_on_engines_are_generated():
    text = PAGE.read_text(encoding="utf-8")

    assert with_tables(text) == text, "run `make config`"


def test_every_ability_of_an_engine_has_a_test_of_that_engine():
    for tests in ABILITIES.values():
        for engine, test in tests.items():
            file, _, name = test.partition("::")
            source = (TESTS / file).read_text(encoding="utf-8")
            functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
            assert name in functions, test
            runs_it = engine in file or f'"{engine}"' in source
            assert runs_it or (engine == "hf" and "hf" in file), f"{test} does not run {engine}"
