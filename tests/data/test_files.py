# SPDX-License-Identifier: Apache-2.0
"""Every kind of data file gives the same rows."""

import csv
import datetime
import json
import os
import pickle
import re
import resource

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.media import noise
from verl.config.files.paths import data_source
from verl.data.bad_rows import BadRowError
from verl.data.files import load_rows
from verl.data.plain_files import Source, first_rows

ROWS = [{"problem": f"{n} + 1?", "answer": str(n + 1), "level": "easy"} for n in range(10)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(rows))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif path.suffix == ".arrow":
        datasets.Dataset.from_list(rows).save_to_disk(str(path.parent / "saved"))
        next((path.parent / "saved").glob("*.arrow")).rename(path)
    return str(path)


def all_rows(*names):
    rows = load_rows(list(names))
    return [rows[index] for index in range(len(rows))]


@pytest.mark.parametrize("kind", [".parquet", ".arrow", ".json", ".jsonl", ".csv", ".pkl"])
def test_every_kind_of_file_gives_the_same_rows(kind, folder):
    assert all_rows(write(folder / f"rows{kind}")) == ROWS


def test_files_of_different_kinds_are_joined_in_order_and_rows_know_their_file(folder):
    first, second = write(folder / "a.jsonl", ROWS[:3]), write(folder / "b.parquet", ROWS[3:])

    rows = load_rows([first, second])

    assert [rows[index] for index in range(10)] == ROWS
    assert rows.where(2) == f"{first}, row 2" and rows.where(3) == f"{second}, row 0"


@pytest.mark.parametrize("content", [{"data": ROWS}, {key: [row[key] for row in ROWS] for key in ROWS[0]}])
def test_json_may_contain_a_data_list_or_columns(content, folder):
    (folder / "a.json").write_text(json.dumps(content))

    assert all_rows(str(folder / "a.json")) == ROWS


def test_a_pickled_data_frame_is_read_as_rows(folder):
    pandas.DataFrame(ROWS).to_pickle(folder / "a.pkl")

    assert all_rows(str(folder / "a.pkl")) == ROWS


def test_a_split_may_carry_a_slice(folder):
    for path in (write(folder / "a.jsonl"), write(folder / "b.parquet")):
        assert all_rows(f"{path}@train[2:4]") == ROWS[2:4]
        assert all_rows(f"{path}@train[:50%]") == ROWS[:5]


def test_a_directory_is_read_by_the_split_in_its_file_names(folder):
    data = folder / "set"
    data.mkdir()
    write(data / "train-00000-of-00002.parquet", ROWS[:4])
    write(data / "train-00001-of-00002.parquet", ROWS[4:8])
    write(data / "test-00000-of-00001.parquet", ROWS[8:])

    assert all_rows(str(data)) == ROWS[:8]
    assert all_rows(f"{data}@test") == ROWS[8:]
    with pytest.raises(ValueError, match=r"\['test', 'train'\], got `@validation`"):
        load_rows(f"{data}@validation")


def test_a_directory_whose_files_name_no_split_is_the_train_split(folder):
    (folder / "set").mkdir()
    write(folder / "set" / "part.jsonl")

    assert all_rows(f"{folder / 'set'}@train") == ROWS


def test_a_data_set_saved_to_disk_is_read_with_its_splits(folder):
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(folder / "splits"))
    table.save_to_disk(str(folder / "table"))

    assert all_rows(f"{folder / 'splits'}@test") == ROWS[:1]
    assert all_rows(str(folder / "table")) == ROWS


def test_rows_of_json_lines_keep_their_own_types(folder):
    rows = [
        {"problem": "text", "images": None},
        {"problem": [{"role": "user", "content": "x"}], "images": []},
        {"problem": "<image>", "images": ["a.png"]},
    ]

    assert all_rows(write(folder / "a.jsonl", rows)) == rows


def test_image_columns_of_parquet_are_returned_as_bytes_not_pixels(folder):
    image = Image.fromarray(noise(8, 6))
    for column in (datasets.Image(), datasets.List(datasets.Image())):
        value = image if isinstance(column, datasets.Image) else [image]
        features = datasets.Features({"images": column})
        table = datasets.Dataset.from_dict({"images": [value]}, features=features)
        table.to_parquet(str(folder / f"{type(column).__name__}.parquet"))

        (row,) = all_rows(str(folder / f"{type(column).__name__}.parquet"))

        first = row["images"] if isinstance(row["images"], dict) else row["images"][0]
        assert first["bytes"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", "no file or directory"),
        ("./absent", "no file or directory"),
        ("", "names no file"),
        ("notes.txt", "must end in one of"),
        ("empty.jsonl", "has no rows"),
        ("bad.jsonl", "bad.jsonl cannot be read: line 2 is not JSON"),
        ("bad.parquet", "bad.parquet cannot be read"),
        ("bad.pkl", "bad.pkl cannot be read"),
        ("a.jsonl@test", "has the split `train` only, got `@test`"),
        ("void", "has no file that ends in"),
    ],
)
def test_an_unreadable_source_is_named(name, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder / "a.jsonl")
    (folder / "notes.txt").write_text("hello")
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    (folder / "bad.parquet").write_text("not a table")
    (folder / "bad.pkl").write_text("not a pickle")
    (folder / "void").mkdir()

    with pytest.raises((ValueError, FileNotFoundError), match="data.train_files.*" + message):
        load_rows(name)


@pytest.fixture
def hub(folder, monkeypatch):
    """The data set `openai/gsm8k` with two subsets, as the hub would serve its files."""
    for subset, rows in (("main", ROWS), ("socratic", ROWS[:4])):
        (folder / "gsm8k" / subset).mkdir(parents=True)
        write(folder / "gsm8k" / subset / "train.jsonl", rows)
    (folder / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/*\n"
            for name in ("main", "socratic")
        )
        + "---\n"
    )
    for function in ("load_dataset", "get_dataset_config_names"):
        called = getattr(datasets, function)

        def local(name, *arguments, called=called, **options):
            return called(str(folder / name.removeprefix("openai/")), *arguments, **options)

        monkeypatch.setattr(datasets, function, local)


def test_a_subset_of_a_data_set_on_the_hub_is_its_third_part(hub):
    assert all_rows("openai/gsm8k/main@train") == ROWS
    assert all_rows("openai/gsm8k/socratic") == ROWS[:4]
    assert all_rows("openai/gsm8k/main@train[2:4]") == ROWS[2:4]


def test_a_subset_may_follow_a_colon(hub, folder):
    for source in ("openai/gsm8k:socratic", "openai/gsm8k:socratic@train"):
        assert all_rows(data_source(source)) == ROWS[:4]
    assert all_rows(data_source("openai/gsm8k:main@train[2:4]")) == ROWS[2:4]
    # a local path with a colon is a path
    assert all_rows(data_source(str(write(folder / "a:b.jsonl")))) == ROWS


@pytest.mark.parametrize("source", ["openai/gsm8k@train", "openai/gsm8k/mains@train"])
def test_a_missing_or_unknown_subset_is_answered_with_the_subsets(hub, source):
    message = r"`data.val_files`: openai/gsm8k.* has the subsets \['main', 'socratic'\]: write one as"
    with pytest.raises(ValueError, match=message):
        load_rows(source, "data.val_files")


# --- hostile files


def write_bomb(path, how, value=b"x" * (1 << 17), count=512):
    """Write a few kilobytes that become 64 MiB."""
    rows = pa.array([value] * count)
    nested = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), rows)
    table = pa.table({"problem": nested if how == "nested" else rows})
    if path.suffix == ".arrow":
        codec = pa.ipc.IpcWriteOptions(compression="zstd")
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_stream(file, table.schema, options=codec) as writer,
        ):
            writer.write_table(table)
    else:
        pq.write_table(table, path, compression="zstd", use_dictionary=how != "pages")
    assert path.stat().st_size < 100_000
    return str(path)


@pytest.mark.parametrize(
    ("name", "how"),
    [("a.parquet", "values"), ("a.parquet", "pages"), ("a.parquet", "nested"), ("a.arrow", "")],
)
def test_a_file_that_becomes_too_large_is_refused_before_it_is_decoded(name, how, folder, monkeypatch):
    monkeypatch.setattr("verl.data.files.FREE_BYTES", 16 << 20)
    file = write_bomb(folder / name, how)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(
        ValueError, match=rf"`data.train_files`: {file} cannot be read: it becomes more than 1\d MiB"
    ):
        load_rows(file)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
    assert not list(folder.glob("cache/**/*.arrow"))


def test_a_file_within_the_limit_is_decoded_once(folder, monkeypatch):
    # 2000 equal texts of 2000 characters are 4 MB, from a few kilobytes.
    file = write_bomb(folder / "a.parquet", "values", "x" * 2000, 2000)
    assert len(load_rows(file)) == 2000

    monkeypatch.setattr("verl.data.files.FREE_BYTES", 0)
    monkeypatch.setattr("verl.data.files.MAX_RATIO", 0)

    assert load_rows(file)[1999] == {"problem": "x" * 2000}


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_is_opened_only_if_it_is_named(folder):
    data = folder / "set"
    data.mkdir()
    write(data / "train.parquet")
    (data / "test.pkl").write_bytes(pickle.dumps([Trap(str(folder / "sprung"))]))

    for name in (f"{data}", f"{data}@test"):
        with pytest.raises(
            ValueError, match=rf"{data} has the pickle {data}/test.pkl, .* name the file itself"
        ):
            load_rows(name)

    assert not (folder / "sprung").exists()
    assert all_rows(write(data / "rows.pkl")) == ROWS


CSV = "prompt,answer\n1 + 1?,2\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            CSV + '"2 + 2?,4\n3 + 3?,6\n',
            "the row that starts at line 3 is not CSV: a quote is opened and never",
        ),
        (CSV + '"2 + 2?,4\n3 + 3?,"6"\n', "the row that starts at line 3 is not CSV: text follows a closing"),
        (CSV + '"2\n+\n2?",4\n5?\n', "line 6 has 1 fields, and the header has 2"),
        (CSV + "2 + 2?,4,easy\n", "line 3 has 3 fields, and the header has 2"),
        ("prompt,answer,prompt\n1,2,3\n", "it has more than one column 'prompt'"),
        (
            "prompt;answer\n1 + 1?;2\n",
            "the header is one column, 'prompt;answer': separate the fields by commas",
        ),
    ],
    ids=[
        "open quote",
        "open quote that closes later",
        "short row",
        "long row",
        "doubled column",
        "semicolons",
    ],
)
def test_a_table_of_text_that_cannot_be_read_as_it_was_meant_is_refused_with_its_line(text, reason, folder):
    (folder / "a.csv").write_text(text)

    with pytest.raises(ValueError, match=re.escape(reason)):
        all_rows(str(folder / "a.csv"))


def test_quoted_fields_keep_commas_quotes_and_lines(folder):
    (folder / "a.csv").write_text('\nprompt,answer\n"a, ""b""\nc",2\n\n')

    assert all_rows(str(folder / "a.csv")) == [{"prompt": 'a, "b"\nc', "answer": "2"}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_column_that_a_row_has_twice_is_refused_and_not_its_last(name, folder):
    text = '{"prompt": "1 + 1?", "answer": "2", "answer": "3"}'
    (folder / name).write_text(f"[{text}]" if name == "a.json" else text + "\n")

    with pytest.raises(ValueError, match="more than one column 'answer'"):
        all_rows(str(folder / name))


def test_a_table_with_two_columns_of_a_name_is_refused(folder):
    table = pa.table(
        [pa.array(["1?"]), pa.array(["1"]), pa.array(["2"])], names=["prompt", "answer", "answer"]
    )
    pq.write_table(table, folder / "a.parquet")

    with pytest.raises(ValueError, match="more than one column 'answer'"):
        first_rows(folder / "a.parquet")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (CSV.encode("utf-16"), "it is UTF-16: save the file as UTF-8"),
        (
            CSV.encode() + "é?,e\n".encode("latin-1"),
            r"line 3 is not UTF-8 \(byte 0xe9\): save the file as UTF-8",
        ),
    ],
    ids=["UTF-16", "Latin-1"],
)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_a_file_in_another_encoding_is_refused_with_the_line_and_the_remedy(content, reason, name, folder):
    (folder / name).write_bytes(content)

    with pytest.raises(ValueError, match=f"{name} cannot be read: {reason}"):
        all_rows(str(folder / name))


def test_a_source_names_the_column_of_a_value_that_only_arrow_can_hold():
    dates = pa.array([0, -800000], pa.date32())
    table = datasets.Dataset(pa.table({"problem": ["a", "b"], "when": dates}))
    source = Source("rows.parquet", table, table.column_names)

    assert source.row(0) == {"problem": "a", "when": datetime.date(1970, 1, 1)}
    with pytest.raises(BadRowError, match="column `when`: date value out of range; dates must"):
        source.row(1)
