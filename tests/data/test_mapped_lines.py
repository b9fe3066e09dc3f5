# SPDX-License-Identifier: Apache-2.0
import json
import os

import numpy as np
import pytest

from verl.data import mapped_lines
from verl.data.files import load_rows
from verl.data.plain_files import read_jsonl


@pytest.fixture(autouse=True)
def mapped(tmp_path, monkeypatch):
    """Every file is large, and the cache is of this test."""
    monkeypatch.setattr(mapped_lines, "MAPPED_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path, text):
    path.write_bytes(text.encode())
    return path


def test_a_mapped_file_has_the_rows_of_one_that_is_read_whole(tmp_path):
    # a mark of Windows, an empty line, ends of Windows, text of two bytes, no end of the last line
    path = write(tmp_path / "a.jsonl", '\ufeff{"a": 1}\r\n\n{"b": "\u00e9\u00e8"}\n  \n{"a": [2]}')

    rows = load_rows(str(path))
    expected = read_jsonl(path)

    assert type(rows.sources[0].rows) is mapped_lines.MappedLines
    assert [rows[index] for index in range(len(rows))] == expected.rows == [{"a": 1}, {"b": "éè"}, {"a": [2]}]
    assert rows.sources[0].columns == expected.columns == ["a", "b"]
    assert list(load_rows(f"{path}@train[1:]").sources[0].rows) == expected.rows[1:]


def test_lines_are_checked_once_and_the_index_is_used_until_the_file_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    builds, build = [], mapped_lines.build_index
    monkeypatch.setattr(mapped_lines, "build_index", lambda path: builds.append(path) or build(path))

    first, again = load_rows(str(path)), load_rows(str(path))
    assert len(builds) == 1 and len(first) == len(again) == 2
    assert isinstance(again.sources[0].rows.starts, np.memmap)

    write(path, '{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert load_rows(str(path))[2] == {"a": 3}
    assert len(builds) == 2


def test_a_broken_line_is_named_as_in_a_small_file(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": \n')

    with pytest.raises(ValueError, match="line 3 is not JSON: it ends too early"):
        load_rows(str(path))


def test_a_line_that_is_no_row_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n[1]\n')

    with pytest.raises(ValueError, match="a list of rows, each a dictionary"):
        load_rows(str(path))


def test_an_index_that_cannot_be_stored_is_kept_in_memory(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", "".join(f"{json.dumps({'a': n})}\n" for n in range(5)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file", "")))

    assert load_rows(str(path))[4] == {"a": 4}
    assert os.listdir(tmp_path).count("cache") == 0
