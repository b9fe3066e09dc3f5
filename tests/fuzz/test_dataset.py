# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a data file: prompts, and for each row that is none its file, number and reason."""

import contextlib
import csv
import json
import pickle
import re

import pandas
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl.config.ppo import DataConfig
from verl.data.files import READERS
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.models.tiny import save_tiny_model

any_text = st.text(st.characters(exclude_categories=()), max_size=10)
marked_text = st.lists(
    st.sampled_from(["<image>", "<video>", "<|image_pad|>", "<|im_end|>", "?", "\0", "\ud800", "🙂"])
).map("".join)
texts = any_text | marked_text | st.just("long " * 20_000)
numbers = st.integers() | st.floats() | st.just(10**400) | st.booleans() | st.none()
paths = st.sampled_from(
    [
        "a.png",
        "/no/b.mp4",
        "~nobody/c.png",
        "x\0.png",
        "é" * 300,
        "\ud800.png",
        "http://127.0.0.1/a.png",
        "file:///no/d.png",
        "",
        "/",
        "~",
    ]
)
parts = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image", "video", "audio", 1, None]),
        "text": texts | numbers,
        "image": paths,
        "url": paths,
        "x": numbers,
    },
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool", "robot", "", None, 1, ["user"]]),
        "content": texts | numbers | st.lists(parts | texts, max_size=3),
        "tool_calls": parts | numbers,
        "name": texts,
    },
)
media = (
    paths
    | st.fixed_dictionaries({}, optional={"bytes": texts | numbers, "path": paths | numbers, "image": paths})
    | numbers
)
nested = st.recursive(
    texts | numbers, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(any_text, inner, max_size=2)
)
cells = {
    "prompt": texts | st.lists(messages, max_size=3) | nested,
    "answer": nested,
    "images": st.lists(media, max_size=2) | media | nested,
    "videos": st.lists(media, max_size=2) | media,
    "level": nested,
}
GOOD = {"prompt": "1?", "answer": "1"}
rows = st.fixed_dictionaries({}, optional=cells) | st.fixed_dictionaries(
    {}, optional={name: cells[name] for name in ("prompt", "images", "videos")}
).map(lambda cells: GOOD | cells)
tables = st.lists(rows, min_size=1, max_size=5).map(lambda rows: [GOOD, *rows])


@pytest.fixture(scope="module")
def open_dataset(tmp_path_factory):
    """Opens a file for a model that reads texts, or one that reads media, too."""
    text = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    media = save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")
    models = {"text": (load_tokenizer(text), None), "media": (load_tokenizer(media), load_processor(media))}

    def open_file(kind, file, **options):
        tokenizer, processor = models[kind]
        folder = str(file.parent)
        config = DataConfig(
            max_prompt_length=64, filter_overlong_prompts_workers=1, image_dir=folder, **options
        )
        loader = None if processor is None else MediaLoader(processor, MediaOptions.from_data(config))
        return RLHFDataset(str(file), tokenizer, processor, config, media=loader, row_timeout_s=20.0)

    return open_file


def check_opens_or_names(open_dataset, kind, file):
    """Bad rows are listed and the others can be read (`skip`), or named (`error`); or the file is named."""
    try:
        dataset = open_dataset(kind, file, on_bad_row="skip")
    except ValueError as error:
        assert "`data.train_files`" in str(error), str(error)
        dataset = None
    else:
        if dataset._reader is not None:
            dataset._reader.close()
        assert all(row.where == f"{file}, row {row.index}" and row.reason for row in dataset.bad_rows)
        assert len(dataset) + len(dataset.bad_rows) + dataset.num_overlong == len(dataset.rows)
        for index in range(len(dataset)):
            assert len(dataset[index]["raw_prompt_ids"]) <= 64
    with (
        pytest.raises(ValueError)
        if dataset is None or dataset.bad_rows
        else contextlib.nullcontext() as raised
    ):
        open_dataset(kind, file, on_bad_row="error")
    if dataset is not None and dataset.bad_rows:
        first = dataset.bad_rows[0]  # alone, or the first of several with its reason
        listed = rf"{re.escape(str(file))}, rows? {first.index}\b[^:]*: (.*)"
        named = re.search(listed, str(raised.value), re.DOTALL)
        assert named is not None and named[1].startswith(first.reason), str(raised.value)


@pytest.mark.nightly("verl/data")
@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        (".jsonl", "text"),
        (".json", "media"),
        pytest.param(".jsonl", "media", marks=pytest.mark.slow),
        pytest.param(".json", "text", marks=pytest.mark.slow),
    ],
)
@given(tables)
@example([GOOD, GOOD | {"prompt": "\ud800"}])
@example([GOOD, GOOD | {"images": ["~nobody/c.png"], "prompt": "<image>"}])
@example([GOOD, GOOD | {"images": 3}])
@example([GOOD, GOOD | {"prompt": [{"role": ["user"], "content": "?"}]}])
def test_any_rows_of_json_are_prompts_or_named(open_dataset, tmp_path, kind, suffix, table):
    file = tmp_path / f"rows{suffix}"
    lines = [json.dumps(row) for row in table]
    file.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")

    check_opens_or_names(open_dataset, kind, file)


@given(st.lists(st.lists(texts, max_size=3), max_size=4))
def test_any_cells_of_csv_are_prompts_or_named(open_dataset, tmp_path, table):
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], *table])

    check_opens_or_names(open_dataset, "text", tmp_path / "rows.csv")


@settings(max_examples=settings.default.max_examples // 3)  # what a table becomes is kept on disk: slow
@pytest.mark.parametrize("suffix", [".parquet", ".pkl"])
@given(
    st.lists(st.text(max_size=10) | st.none(), min_size=1, max_size=3)
    | st.lists(st.integers(0, 9), min_size=1)
)
def test_any_column_of_a_table_is_prompts_or_named(open_dataset, tmp_path, suffix, column):
    write = {".parquet": pandas.DataFrame.to_parquet, ".pkl": pandas.DataFrame.to_pickle}[suffix]
    write(pandas.DataFrame({"prompt": column, "answer": 1}), tmp_path / f"rows{suffix}")

    check_opens_or_names(open_dataset, "text", tmp_path / f"rows{suffix}")


@pytest.mark.parametrize("suffix", [suffix for suffix in READERS if suffix != ".pkl"])
@given(
    st.one_of(
        st.binary(max_size=100),
        st.sampled_from(
            [
                b"[" * 100_000,
                b"PAR1",
                b"PAR1" * 9,
                b"\xff\xfe",
                b"{}",
                b"[]",
                b"null",
                b'{"data": 1}',
                b"[[]]",
                b'"x"',
                b'[{"prompt": 1}, 2]',
                b'{"prompt": ["1"], "answer": "1"}',
                b'{"prompt": ["1"], "answer": []}',
                b'[{"prompt": ' + b"9" * 5000 + b"}]",
                b'prompt,answer\r\n"1',
                b"prompt,prompt\n1,2",
                b",\n1,2",
                b"ARROW1\0\0" * 3,
            ]
        ),
    )
)
def test_any_bytes_as_a_data_file_are_rows_or_an_error_that_names_it(open_dataset, tmp_path, suffix, content):
    (tmp_path / f"rows{suffix}").write_bytes(content)

    check_opens_or_names(open_dataset, "text", tmp_path / f"rows{suffix}")


@pytest.mark.parametrize(
    "content",
    [
        None,
        3,
        {1: 2},
        [{1: 2, "prompt": 3}],
        [GOOD, {1: 2}],
        {"prompt": ["?"], 1: ["a"]},
        ["row"],
        [[]],
        b"",
        GOOD,
    ],
    ids=str,
)
def test_any_pickled_value_is_rows_or_an_error_that_names_the_file(open_dataset, tmp_path, content):
    (tmp_path / "rows.pkl").write_bytes(pickle.dumps(content))

    check_opens_or_names(open_dataset, "text", tmp_path / "rows.pkl")
