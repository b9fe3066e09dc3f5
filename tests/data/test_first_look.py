# SPDX-License-Identifier: Apache-2.0
"""Notes and errors about rows, columns and templates, before torch is imported."""

import datetime
import json
import re
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.media import save_image
from tests.helpers.training import ROOT
from verl.config.data import DataConfig, SourceConfig
from verl.config.model import ModelConfig
from verl.config.sft import SFTDataConfig
from verl.data import plain_files
from verl.data.first_look import check_chat_template, look_at_data
from verl.data.plain_files import first_rows

ROW = {"prompt": "<image>What?", "answer": "red", "images": ["a.png"]}


@pytest.fixture
def eyes(tmp_path):
    """The folder of a model that reads images, as far as its files show."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "preprocessor_config.json").write_text("{}")
    save_image(tmp_path / "a.png", 8, 8)
    return str(folder)


def save(path, rows):
    """Write rows as the suffix says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))
    return path


def look(path, model, **options):
    given = {"train_files": str(path), "image_dir": str(path.parent), "rollout_batch_size": 1}
    data = replace(DataConfig(), **(given | options))
    return look_at_data(data, model).notes


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_the_first_rows_of_every_kind_of_file_are_looked_at(suffix, eyes, tmp_path):
    assert look(save(tmp_path / f"a{suffix}", [ROW] * 3), eyes) == []
    with pytest.raises(ValueError, match=r"no column `prompt`.*set `data.prompt_key=question`"):
        look(save(tmp_path / f"b{suffix}", [{"question": "1?", "answer": "1"}]), eyes)
    with pytest.raises(ValueError, match="has the column `picture` of images, which no option reads"):
        look(save(tmp_path / f"c{suffix}", [{"prompt": "What?", "answer": "1", "picture": ["a.png"]}]), eyes)


def test_a_table_of_excel_with_its_mark_is_read(eyes, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfprompt,answer\n1+1?,2\n")

    assert look(path, eyes) == []


def test_missing_files_of_media_are_one_line(eyes, tmp_path):
    rows = [ROW | {"images": [f"{number}.png"]} for number in range(5)]
    message = (
        r"`data.train_files`: 5 rows cannot be used:\n  .*a.jsonl, rows 0, 1, 2 and 2 more; row 0: the image"
        r" .*0.png cannot be read: there is no such file\nrepair the data"
    )
    with pytest.raises(ValueError, match=message):
        look(save(tmp_path / "a.jsonl", rows), eyes)


def test_rows_that_may_be_left_out_are_left_to_the_run(eyes, tmp_path):
    path = save(tmp_path / "a.jsonl", [ROW | {"images": ["none.png"]}, ROW])

    assert look(path, eyes, on_bad_row="skip") == []
    data = DataConfig(train_files=str(path), image_dir=str(tmp_path))
    assert look_at_data(data, eyes, checks_rows=False).notes == []


def test_a_marker_without_images_names_the_column_that_has_them(eyes, tmp_path):
    # The column is there, so the files are right; this row is not.
    odd = {"prompt": "<image>What?", "answer": "1", "images": [], "picture": ["a.png"]}
    message = (
        "the prompt has 1 <image> but the row has 0 images in column `images` (`data.image_key`): its column"
        " `picture` looks like images: set `data.image_key=picture`"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        look(save(tmp_path / "a.jsonl", [ROW, odd]), eyes)


def test_a_row_without_images_and_without_any_other_column_is_told_what_it_lacks(eyes, tmp_path):
    rows = [{"prompt": "<image>What?", "answer": "1"}]
    message = r"in column `images` \(`data.image_key`\), which is missing: give the row its images there, or"
    with pytest.raises(ValueError, match=message):
        look(save(tmp_path / "a.jsonl", rows), eyes)


def test_templates_are_parsed_and_used_on_the_first_rows(eyes, tmp_path):
    path, template = save(tmp_path / "a.jsonl", [ROW]), tmp_path / "a.jinja"
    template.write_text("{% if content %}\n{{ content }}\n{% endfor %}")
    with pytest.raises(ValueError, match=r"`data.format_prompt` \(.*a.jinja\), line 3: "):
        look(path, eyes, format_prompt=str(template))
    with pytest.raises(ValueError, match=r"`data.override_chat_template` \(.*a.jinja\), line 3: "):
        look(path, eyes, override_chat_template=str(template))
    template.write_text("{{ content }} {{ hint }}")
    with pytest.raises(ValueError, match=r"a\.jsonl, row 0: the template .* failed: 'hint' is undefined"):
        look(path, eyes, format_prompt=str(template))


def test_conversations_are_looked_at_as_well(tmp_path):
    path = save(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "Hello"}]}])
    model = tmp_path / "text"
    model.mkdir()
    with pytest.raises(ValueError, match="row 0: no message has the role `assistant`"):
        look_at_data(SFTDataConfig(train_files=str(path)), str(model))


def test_without_the_files_of_the_model_rows_are_left_to_the_run(tmp_path):
    assert look(save(tmp_path / "a.jsonl", [ROW | {"images": ["none.png"]}]), "owner/model") == []


@pytest.mark.parametrize("name", ["owner/name@train", "owner/name/subset"])
def test_data_of_the_hub_are_left_to_the_run(name, eyes):
    assert look_at_data(DataConfig(train_files=name), eyes) == ([], [])


def test_a_slice_is_left_to_the_run_and_a_split_of_a_folder_is_found(eyes, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    wrong = save(folder / "test.jsonl", [{"a": "1"}])
    save(folder / "train.jsonl", [ROW])

    assert look(wrong, eyes, train_files=f"{wrong}@train[:0]") == []
    assert look(wrong, eyes, train_files=str(folder), image_dir=str(tmp_path)) == []
    with pytest.raises(ValueError, match=r"test.jsonl has no column `prompt`"):
        look(wrong, eyes, train_files=f"{folder}@test")


LINES = {
    '{"prompt": "1?", "answer": "1': "a string is not closed (column 28)",
    '{"prompt": "1?", "answer"': "it ends too early: a colon is missing (column 26)",
    '{"prompt": "1?" "answer": "1"}': "a comma, or a bracket at the end, is missing (column 17)",
    '{"prompt": "1?",, "answer": "1"}': "a name in double quotes is missing (column 17)",
    "{'prompt': '1?'}": "a name in double quotes is missing (column 2)",
    '{"prompt": "1\t?"}': r"a string has a tab or a line break: write \t or \n (column 14)",
    '{"prompt": "1?"} {"prompt"': "the row ends here, but more follows (column 18)",
    '{"prompt": }': "a value is missing (column 12)",
}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("line", LINES)
def test_a_broken_line_is_named_as_an_editor_counts_it(line, ending, tmp_path):
    path = tmp_path / "a.jsonl"
    good = '{"prompt": "1?", "answer": "1"}'
    path.write_bytes(ending.join([good, good, "", line, good]).encode())

    with pytest.raises(
        ValueError, match=re.escape(f"cannot be read: line 4 is not JSON: {LINES[line]}") + "$"
    ):
        first_rows(path)


def test_a_broken_file_of_json_is_named_by_line_and_column(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"data": [\n  {"prompt": "1?"}\n  {"prompt": "2?"}\n]}')

    with pytest.raises(ValueError, match=r"line 3 is not JSON: a comma, or a bracket .* \(column 3\)$"):
        first_rows(path)


def test_a_damaged_table_is_named_and_the_reason_said_once(tmp_path):
    path = save(tmp_path / "a.parquet", [ROW])
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: ") as caught:
        first_rows(path)
    assert str(caught.value).count("Parquet magic bytes not found") == 1


def test_a_row_with_a_date_that_python_lacks_is_left_to_the_reader_of_the_whole_file(tmp_path):
    table = pa.table({"problem": ["a", "b"], "when": pa.array([0, -800000], pa.date32())})
    pq.write_table(table, tmp_path / "a.parquet")

    assert first_rows(tmp_path / "a.parquet") is None


def start_of(path):
    seen = first_rows(path)
    assert seen is not None
    return seen


def test_only_the_first_rows_of_a_large_file_are_read(tmp_path, monkeypatch):
    rows = [{"n": number, "day": datetime.date(2020, 1, 1)} for number in range(1000)]
    table = start_of(save(tmp_path / "a.parquet", rows))

    assert len(table.source.rows) == plain_files.FIRST_ROWS and not table.are_all
    assert table.source.rows[9] == rows[9]
    monkeypatch.setattr(plain_files, "FIRST_BYTES", 100)
    lines = start_of(save(tmp_path / "a.jsonl", [{"n": number} for number in range(1000)]))
    assert 5 < len(lines.source.rows) < 20 and not lines.are_all
    assert first_rows(save(tmp_path / "a.json", [{"n": number} for number in range(1000)])) is None
    short = start_of(save(tmp_path / "b.jsonl", [{"n": 1}]))
    assert short.are_all and len(short.source.rows) == 1


def test_a_pickle_is_not_opened(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"not even one")

    assert first_rows(path) is None


ENDS_WITHOUT = """
import sys
from {module} import main
status = main(sys.argv[1:])
heavy = {{"torch", "transformers", "datasets", "ray", "vllm", "pandas"}} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""
COMMANDS = {
    "run": ("verl.trainer.main", []),
    "dry run": ("verl.trainer.main", ["--dry-run"]),
    "data_check": ("verl.cli.data_check", []),
    "fine-tuning": ("verl.trainer.sft", []),
}


@pytest.mark.parametrize("module, switches", COMMANDS.values(), ids=COMMANDS)
def test_a_command_answers_before_it_imports_what_takes_long(module, switches, eyes, tmp_path):
    path = save(tmp_path / "rows.parquet", [{"x": "1?", "y": "1", "picture": "a.png"}])
    (tmp_path / "model" / "config.json").write_text("{}")
    options = [
        f"data.train_files={path}", "data.val_files=", "trainer.val_freq=-1", "trainer.logger=[file]",
        "trainer.val_before_train=false", f"worker.actor.model.model_path={eyes}",
        f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    ]  # fmt: skip
    if module != "verl.trainer.sft":
        options.insert(0, "config=examples/quickstart/demo.yaml")
        options.append("worker.reward.reward_function=examples/quickstart/reward.py:compute_score")
    code = ENDS_WITHOUT.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code, *options, *switches],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert done.returncode == 2, done.stderr
    assert "rows.parquet has n" in done.stderr and "it has ['picture', 'x', 'y']" in done.stderr


def test_what_a_text_model_cannot_see_is_a_note(tmp_path):
    path = save(tmp_path / "rows.jsonl", [{"prompt": "1?", "answer": "1", "picture": "a.png"}])
    model = tmp_path / "text"
    model.mkdir()

    (note,) = look(path, str(model))
    assert f"{path} has the column `picture` of images, which the model cannot read" in note


def test_files_that_a_class_of_the_users_reads_are_left_to_it(eyes, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("a format of its own")

    assert look(file, eyes, dataset="/mine.py:MyRows") == []
    with pytest.raises(ValueError, match="is not JSON"):
        look(file, eyes)


def test_too_few_rows_for_a_batch_are_told_if_all_of_them_were_seen(eyes, tmp_path):
    (tmp_path / "rows").mkdir()
    few = save(tmp_path / "rows" / "few.jsonl", [ROW | {"images": [str(tmp_path / "a.png")]}] * 3)

    assert look(few, eyes, rollout_batch_size=3) == []
    with pytest.raises(ValueError, match=r"`data.rollout_batch_size` \(4\) must be at most .* got 3"):
        look(few, eyes, rollout_batch_size=4)
    with pytest.raises(ValueError, match=r"`data.mini_rollout_batch_size` \(8\) must be at most .* got 6"):
        look(few, eyes, train_files=[str(few), str(few)], rollout_batch_size=16, mini_rollout_batch_size=8)
    assert look(few, eyes, train_files=str(few.parent), rollout_batch_size=4) == [], "a folder may have more"
    with pytest.raises(ValueError, match=r"got 3: `data.train_files` has 3 rows"):
        look(few, eyes, rollout_batch_size=4)
    with pytest.raises(ValueError, match=r"got 6: `data.sources` has 6 rows"):
        sources = {name: SourceConfig(train_files=str(few)) for name in ("a", "b")}
        look_at_data(DataConfig(sources=sources, rollout_batch_size=8), None)


def test_columns_of_categories_must_be_in_one_of_the_validation_files(tmp_path):
    first = save(tmp_path / "a.jsonl", [{"prompt": "What?", "answer": "red", "level": 1}])
    second = save(tmp_path / "b.jsonl", [{"prompt": "Where?", "answer": "up", "topic": "x"}])
    data = DataConfig(val_files=[str(first), str(second)], category_keys=("level", "answer", "topic"))

    look_at_data(data, None)

    wrong = replace(data, category_keys=("level", "prompt", "subject"))
    with pytest.raises(
        ValueError, match=r"`prompt`, `subject` cannot be a column of categories: .*'topic'\]"
    ):
        look_at_data(wrong, None)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.csv", "prompt,answer\n"), ("a.json", "[]")]
)
def test_a_file_without_rows_is_told_with_its_option(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    train = save(tmp_path / "train.jsonl", [{"prompt": "?", "answer": "red"}])

    with pytest.raises(ValueError, match=rf"^`data.val_files` \(.*/{name}\) has no rows$"):
        look(train, None, val_files=str(tmp_path / name))
    look(train, None, val_files=[str(tmp_path / name), str(train)])


def test_a_model_without_a_chat_template_is_told_by_its_files(tmp_path):
    model = ModelConfig(model_path=str(tmp_path))
    check_chat_template(model, None)  # nothing is known
    (tmp_path / "tokenizer_config.json").write_text("{}")

    with pytest.raises(ValueError, match="has no chat template"):
        check_chat_template(model, None)
    check_chat_template(model, "mine.jinja")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_chat_template(model, None)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_chat_template(model, None)


def test_a_name_that_the_template_does_not_find_is_told_with_those_of_the_row(tmp_path):
    (tmp_path / "prompt.jinja").write_text("{{ question }}")
    (tmp_path / "model").mkdir()
    train = save(tmp_path / "train.jsonl", [{"prompt": "?", "answer": "red"}])

    with pytest.raises(ValueError, match="'question' is undefined; the row has content, prompt, answer"):
        look(train, str(tmp_path / "model"), format_prompt=str(tmp_path / "prompt.jinja"))
