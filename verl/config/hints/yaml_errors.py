# SPDX-License-Identifier: Apache-2.0
"""Errors of the YAML parser in words that a person would use."""

import re

import yaml

OPENED = re.compile(r"[\[{]")
ENTRY = re.compile(r"\s*(?:- )?([\w.]+): +(\S.*)")  # `key: value`
REPEATED = "found duplicate key "
MAX_SHOWN = 80  # characters of a line in a message

YamlProblem = tuple[int | None, str]  # a line, from 1, and what is wrong with it


def explain(error: yaml.YAMLError, text: str) -> YamlProblem:
    """Return what is wrong with a text that the parser refused."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return None, " ".join(str(error).split())
    lines, problem = text.splitlines() or [""], error.problem or "it cannot be read"
    here = lines[min(mark.line, len(lines) - 1)]
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return mark.line + 1, "it starts with a tab; YAML indents by spaces"
    if problem.startswith(REPEATED):
        return mark.line + 1, _repeated(lines, mark, problem.removeprefix(REPEATED))
    if "mapping values are not allowed" in problem:
        return _second_value(lines, mark)
    opened = error.context_mark if OPENED.search(problem) or "quoted" in (error.context or "") else None
    if "flow" in (error.context or "") and error.context_mark is not None:
        opened = error.context_mark
    if opened is not None and opened.line < len(lines) and "unhashable" not in problem:
        sign = lines[opened.line][opened.column : opened.column + 1]
        return opened.line + 1, f"the {sign} in column {opened.column + 1} is not closed"
    return mark.line + 1, _at_one_place(problem, lines, mark)


def _at_one_place(problem: str, lines: list[str], mark: yaml.Mark) -> str:
    here = lines[min(mark.line, len(lines) - 1)]
    sign = here[mark.column : mark.column + 1]
    if "unhashable key" in problem or ("unexpected" in problem and "{{" in here):
        return f"a value that starts with {{ needs quotes: {_quoted_entry(here)}"
    if "cannot start any token" in problem or "undefined alias" in problem:
        return f"a value that starts with {sign} needs quotes: {_quoted_entry(here)}"
    if "expected node content" in problem:
        return "a value is missing, or a bracket is not closed"
    if "did not find expected key" in problem or "expected '-' indicator" in problem:
        indent = _indent(here)
        above = _open_indents(lines[: mark.line])
        if indent not in above:
            spaces = "1 space" if indent == 1 else f"{indent} spaces"
            return f"it is indented by {spaces}, the sections above by {' or '.join(map(str, above))}"
        return f"it does not continue the lines above: `{_short(here)}`"
    return problem


def _open_indents(lines: list[str]) -> list[int]:
    """Return the indents of the last line and of the sections that it is in."""
    indents: list[int] = []
    for line in reversed(lines):
        if line.strip() and not line.lstrip().startswith("#") and (not indents or _indent(line) < indents[0]):
            indents.insert(0, _indent(line))
    return indents


def _second_value(lines: list[str], mark: yaml.Mark) -> YamlProblem:
    here = lines[mark.line]
    if ":" in here[: mark.column]:
        return mark.line + 1, f"a value with a colon needs quotes: {_quoted_entry(here)}"
    number = next((line for line in range(mark.line - 1, -1, -1) if lines[line].strip()), None)
    if number is None:
        return mark.line + 1, f"`{_short(here)}` has a colon too many"
    above = lines[number]
    if not ENTRY.fullmatch(above):
        return number + 1, f"`{_short(above)}` needs `: ` (a colon and a space) after its name"
    text = f"it is indented further than line {number + 1}, `{_short(above)}`, which has a value"
    return mark.line + 1, text


def _repeated(lines: list[str], mark: yaml.Mark, name: str) -> str:
    indent = mark.column  # unless it is in braces: then no line begins there
    for number in range(mark.line - 1, -1, -1):
        if lines[number].strip() and _indent(lines[number]) < indent:
            break  # another section
        if _indent(lines[number]) == indent and lines[number].strip().partition(":")[0].strip("\"'") == name:
            return f"`{name}` is there already, in line {number + 1}: keep one of them"
    return f"`{name}` is there twice: keep one of them"


def _quoted_entry(line: str) -> str:
    entry = ENTRY.fullmatch(line)
    return f"`{entry[1]}: {_quoted(_short(entry[2]))}`" if entry else f"`{_quoted(_short(line))}`"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "..."


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
