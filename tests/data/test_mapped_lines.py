# SPDX-License-Identifier: Apache-2.0
import json
import os
import random

import pytest

from tests.data.test_loader import answers, make_train
from verl.data import mapped_lines
from verl.data.files import load_rows
from verl.data.plain_files import read_jsonl
from verl.models.tiny import save_tiny_model

# Rows, one of them longer than a block, text of several bytes, ends of Windows, blank lines of all kinds.
LINES = (
    '{"a": 1}', '{"b": "\u00e9\u00e8\u2028"}', '  {"a": [2]}', '{"c": {}}\r', f'{{"e": "{"x" * 200}"}}',
    "", "\r", "  ", "\t \r", "\u00a0\u2003",
)  # fmt: skip


@pytest.fixture(autouse=True)
def mapped(monkeypatch):
    """Every file is large, and has several chunks of several blocks."""
    monkeypatch.setattr(mapped_lines, "MAPPED_BYTES", 1)
    monkeypatch.setattr(mapped_lines, "BLOCK", 32)
    monkeypatch.setattr(mapped_lines, "CHUNK", 128)


@pytest.fixture
def sample_of_ends(monkeypatch):
    """Only the first two rows and the last one are parsed at once."""
    monkeypatch.setattr(mapped_lines, "FIRST_ROWS", 2)
    monkeypatch.setattr(mapped_lines, "SPACED_ROWS", 2)


def test_empty_lines_are_counted_and_not_read_one_by_one(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", '{"a": 1}\n' + "\n" * 500 + '{"a": 2}\n\n')
    read = []
    is_blank = mapped_lines.MappedLines._is_blank
    monkeypatch.setattr(
        mapped_lines.MappedLines, "_is_blank", lambda file, start: read.append(start) or is_blank(file, start)
    )

    file = mapped_lines.MappedLines(path)

    assert len(file) == 2 and len(read) == 1
    assert file.row(1) == {"a": 2}


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def check_same(path):
    """Compare with the rows of a file that is read whole; return them."""
    expected = read_jsonl(path)
    rows = load_rows(str(path)).sources[0].rows

    assert type(rows) is mapped_lines.MappedLines
    assert list(rows) == [rows[index] for index in range(-len(rows), 0)] == expected.rows
    assert load_rows(str(path)).sources[0].columns == expected.columns
    return expected.rows


def test_a_mapped_file_has_the_rows_of_one_that_is_read_whole(tmp_path):
    # a mark of Windows, an empty line, ends of Windows, text of two bytes, no end of the last line
    path = write(tmp_path / "a.jsonl", '\ufeff{"a": 1}\r\n\n{"b": "\u00e9\u00e8"}\n  \n{"a": [2]}')

    assert check_same(path) == [{"a": 1}, {"b": "éè"}, {"a": [2]}]
    assert list(load_rows(f"{path}@train[1:]").sources[0].rows) == [{"b": "éè"}, {"a": [2]}]


@pytest.mark.parametrize("seed", range(40))
def test_blank_lines_and_rows_of_any_length_are_found_in_any_block(seed, tmp_path):
    choose = random.Random(seed)
    lines = choose.choices(LINES[: choose.choice((5, len(LINES)))], k=choose.randrange(1, 60))
    text = "\n".join(['{"first": 0}', *lines])

    rows = check_same(
        write(tmp_path / "a.jsonl", choose.choice(("", "\n", "\ufeff")) + text + "\n" * choose.randrange(3))
    )

    assert len(rows) == 1 + sum(bool(line.strip()) for line in lines)


@pytest.mark.parametrize("size", range(120, 136))
def test_line_ends_at_the_ends_of_blocks_and_chunks_are_counted_once(size, tmp_path):
    fill = '{"a": "' + "x" * (size - 10) + '"}\n'
    assert len(fill) == size

    check_same(write(tmp_path / "a.jsonl", fill + '\n{"a": 1}\n' + fill + '{"a": 2}\n' * 40))


def test_a_file_that_is_cut_while_it_is_open_is_an_error_that_names_it(tmp_path, sample_of_ends):
    path = write(tmp_path / "a.jsonl", "".join(f'{{"a": {n + 10**8}}}\n' for n in range(10_000)))
    rows = load_rows(str(path)).sources[0].rows
    os.truncate(path, 100)

    for row in (0, 9_999):
        with pytest.raises(ValueError, match=r"a\.jsonl.*it was cut while it was open"):
            rows[row]


def test_a_file_of_blank_lines_has_no_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", "\n \r\n\n" * 50)

    with pytest.raises(ValueError, match="has no rows"):
        load_rows(str(path))


@pytest.mark.parametrize("place", [0, 300, 5110])
def test_a_broken_line_of_the_sample_is_named_at_once(place, tmp_path):
    # 511 distances of 10 rows
    lines = [f'{{"a": {number}}}' for number in range(5111)]
    lines[place] = '{"a": '
    path = write(tmp_path / "a.jsonl", "\n\n".join(lines))

    with pytest.raises(
        ValueError, match=f"cannot be read: line {2 * place + 1} is not JSON: it ends too early"
    ):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a": ', "line 14 is not JSON: it ends too early: a value is missing"),
        (b"[1]", r"line 14 must be a row, such as .*, got \[1\]"),
        (b"null", "line 14 must be a row, such as .*, got null"),
        (b'{"a": "\xff"}', "line 14 is not UTF-8 text: .* byte 0xff in position 7"),
        (b'{"a": ' + b"[" * 20_000, "RecursionError"),
    ],
)
def test_a_bad_line_far_from_the_sample_is_named_when_it_is_read(line, fault, tmp_path, sample_of_ends):
    lines = [b'{"a": 1}'] * 20
    lines[9] = line  # after four blank lines
    path = write(tmp_path / "a.jsonl", b"\n\n\r\n \n" + b"\n".join(lines))

    rows = load_rows(str(path))

    assert len(rows) == 20 and rows[8] == rows[10] == {"a": 1}
    with pytest.raises(ValueError, match=f"a.jsonl cannot be read: {fault}"):
        rows[9]
    with pytest.raises(ValueError, match=fault):
        load_rows(f"{path}@train[5:]")[4]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def prompts(path, changed):
    """Write 80 prompts, of which one line is another."""
    rows = [json.dumps({"prompt": f"number {n}", "answer": n, "hint": None}) for n in range(80)]
    rows[70] = changed
    return str(write(path, "\n".join(rows)))


def columns_of(loader):
    return [batch.non_tensor_batch for batch in loader]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_line_is_a_bad_row_of_the_run(streaming, text_model, tmp_path, sample_of_ends):
    path = prompts(tmp_path / "a.jsonl", '{"prompt": ')
    options = dict(train_files=path, shuffle=False, streaming=streaming)

    skipping = make_train(text_model, tmp_path, on_bad_row="skip", **options)
    assert answers(skipping)[17:] == [[68, 69, 71, 72], [73, 74, 75, 76]]

    with pytest.raises(ValueError, match=r"row 70: .*line 71 is not JSON"):
        answers(make_train(text_model, tmp_path, **options))


def test_a_column_of_rows_far_from_the_sample(text_model, tmp_path, sample_of_ends, caplog):
    path = prompts(tmp_path / "a.jsonl", '{"prompt": "more", "answer": 5, "hint": "five", "level": 3}')

    # all rows are read before the first step, so it travels with all of them
    loader = make_train(text_model, tmp_path, train_files=path, shuffle=False)
    batches = columns_of(loader)
    assert batches[0]["level"].tolist() == [None] * 4
    assert batches[17]["level"].tolist() == [None, None, 3, None]

    # a stream would have batches with it and without it
    loader = make_train(text_model, tmp_path, train_files=path, shuffle=False, streaming=True)
    batches = columns_of(loader)
    assert not any("level" in batch for batch in batches)
    assert batches[17]["hint"].tolist() == [None, None, "five", None]
    assert caplog.text.count("no row of the sample has it: column=level") == 1


def test_the_numbers_in_memory_are_few(tmp_path):
    path = write(tmp_path / "a.jsonl", "".join(f"{json.dumps({'a': n})}\n" for n in range(5000)))

    counts = load_rows(str(path)).sources[0].rows.counts

    blocks = -(-path.stat().st_size // 32)
    assert counts.lines.shape == counts.rows.shape == (blocks + 1,)
    assert counts.rows[-1] == 5000
