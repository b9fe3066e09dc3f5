# SPDX-License-Identifier: Apache-2.0
"""Plain English in code, messages and pages: phrases that a native engineer would not write."""

import ast
import io
import re
import tokenize

import pytest

from tests.architecture.source import PACKAGE, ROOT, source_files, tree_of

PHRASES = {
    r"beside": "next to, in addition to, compared with",
    r"anew": "again",
    r"nobody": "no one, or name who",
    r"under way": "running, in progress",
    r"(?:go|goes|going|went) on(?! GPUs?\b)": "continue",
    r"stands?(?! for\b| in for\b| out\b)": "is",
    r"stood": "was",
    r"said of": "metadata of",
    r"at hand": "available",
    r"(?:tell|tells|told) of": "report, show",
    r"(?:take|takes|taken|took|give|gives|given|gave) back": "release, return",
    r"those that": "name them",
    r"in place of": "instead of",
    r"(?:what|who) else (?:has|is|there)": "name it",
    r"oftener": "more often",
    r"cannot be had": "is not available",
    r"as it is one": "because",
    r"for want of": "because there is no",
    r"lest": "so that ... does not",
    r"of (?:now|then)": "current, of that time",
    r"the ones that": "name them",
    r"are told": "are reported",
    r"sample on": "keep sampling",
    r"at their work": "busy",
    r"further ones?": "more, the rest, later ones",
}
PROSE_PHRASES = {  # of docstrings and pages; a message may end in "is no JSON"
    r"so many(?! as\b)": "name the number",
    r"(?<!there )is no(?! longer\b| more\b)": "is not a, means no",
    r"colours?": "color",
}
PHRASE, PROSE_PHRASE = (
    re.compile(r"\b(?:" + "|".join(phrases) + r")\b", re.IGNORECASE)
    for phrases in (PHRASES, PHRASES | PROSE_PHRASES)
)
OWN = re.compile(r"\b\w+ of (?:its|their) own\b")
MAX_OWN = 55  # in pages and docstrings together; only goes down
CLAUSE = re.compile(r"(?:The )?\w+(?: \w+)? (?:whose|that)\b")
OPENING = re.compile(r"(?:What|Whether|Those|How|Which|Of)\b")
OWNER = re.compile(r"^\s+\w+: Of (?:the|a|an|its|every|each)\b", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
FOLDERS = ("verl", "examples", "scripts", "benchmarks")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(path):
    """Yield the line and the text of each comment and each string that holds words."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string


def docstrings(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def advice(text, phrases=PHRASE):
    """The phrases of a text, each with what to write instead."""
    for match in phrases.finditer(text):
        # the match in its text: a phrase may depend on the words around it
        instead = next(
            words
            for phrase, words in (PHRASES | PROSE_PHRASES).items()
            if re.compile(phrase, re.IGNORECASE).match(text, match.start())
        )
        yield match, f"{match[0]!r}: {instead}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_and_messages_are_plain_english(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line + text[: match.start()].count(chr(10))}: {words}"
        for path in source_files(ROOT / folder)
        for line, text in prose(path)
        for match, words in advice(text)
    ]

    assert found == [], "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_plain_english(path):
    text = words_of(path)

    assert [
        f"line {text[: match.start()].count(chr(10)) + 1}: {words}"
        for match, words in advice(text, PROSE_PHRASE)
    ] == []


def words_of(page):
    """A page without its code."""
    return FENCE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text())


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_plain_english(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in source_files(ROOT / folder)
        for line, text in docstrings(path)
        for _, words in advice(FENCE.sub("", text), PROSE_PHRASE)
    ]

    assert found == [], "\n".join(found)


def test_few_things_are_of_their_own():
    texts = [words_of(path) for path in PAGES]
    texts += [text for path in source_files(PACKAGE) for _, text in docstrings(path)]

    assert sum(len(OWN.findall(text)) for text in texts) <= MAX_OWN


def test_the_first_line_of_a_module_names_it_without_a_relative_clause():
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in source_files(PACKAGE)
        if (text := ast.get_docstring(tree_of(path))) and CLAUSE.match(text)
    ]

    assert found == [], "\n".join(found)


def test_the_first_line_of_a_docstring_says_what_the_thing_is_or_does():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in source_files(PACKAGE)
        for line, text in docstrings(path)
        if OPENING.match(text)
    ]

    assert found == [], "start with a verb or a noun:\n" + "\n".join(found)


def test_an_argument_is_described_by_a_noun():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0].strip()}"
        for path in source_files(PACKAGE)
        for line, text in docstrings(path)
        for match in OWNER.finditer(text)
    ]

    assert found == [], "\n".join(found)


def test_the_lint_finds_what_it_bans():
    assert [words for _, words in advice("It stands beside a flag that stands for nothing.")] == [
        "'stands': is",
        "'beside': next to, in addition to, compared with",
    ]
