# SPDX-License-Identifier: Apache-2.0
"""`scripts/convert_data.py`: from files of the hub to prompts of a run and full scores."""

import json

import datasets
import huggingface_hub
import pytest
from pyarrow import parquet

from examples.data_preprocess.common import CONTRADICTING, REPEATED, write_files
from scripts.convert_data import DATA_SETS, main
from tests.architecture.test_examples import command_of
from tests.examples.test_data_preprocess import DAPO_PROMPT, dapo_row, longvideo_row
from tests.helpers.media import image_bytes, save_video
from tests.helpers.training import ROOT
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.config.sft import SFTDataConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.rewards.function import load_reward_function

PNG = {"bytes": image_bytes(60, 50), "path": "a.png"}
IMAGES = {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string")}
SOURCES = {  # rows as the hub has them, the types that it declares where they are not plain, their answers
    "gsm8k": ([{"question": "48 + 24?", "answer": "It is <<48+24=72>>72.\n#### 1,072"}], None, ["1072"]),
    "math": (
        [{"problem": "x?", "level": "Level 2", "type": "Algebra", "solution": r"$\boxed{\frac{1}{2}}$"}],
        None,
        [r"\frac{1}{2}"],
    ),
    "dapo17k": ([dapo_row(DAPO_PROMPT.format("Find $n$."))] * 3, None, ["34"]),
    "geometry3k": (
        [{"images": [PNG], "problem": "<image>Find x.", "answer": r"2 \sqrt { 3 }"}],
        datasets.Features(IMAGES | {"answer": datasets.Value("string")}),
        [r"2 \sqrt { 3 }"],
    ),
    "clevr": (
        [{"image": PNG, "problem": "How many?", "solution": "<answer> 3 </answer>"}],
        datasets.Features(
            {
                "image": datasets.Image(),
                "problem": datasets.Value("string"),
                "solution": datasets.Value("string"),
            }
        ),
        ["3"],
    ),
    "geoqa8k": (
        [{"images": [PNG], "problem": "<image>AOB?", "answer": "145°"}],
        datasets.Features(IMAGES | {"answer": datasets.Value("string")}),
        ["145°"],
    ),
}
RESPONSES = {
    "math": r"<think>so</think> \boxed{{{}}}",
    "r1v": "<think>so</think><answer>{}</answer>",
    "dapo": "So.\nAnswer: {}",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write_jsonl(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def write_parquet(path, rows, features=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(path))
    return str(path)


def read(path):
    return datasets.Dataset.from_parquet(str(path)).to_list()


def open_as_a_run_does(name, file, folder, monkeypatch, *options):
    """The prompts and the reward function of the example that goes with a data set."""
    monkeypatch.chdir(ROOT)
    overrides = [f"data.train_files={file}", "data.filter_overlong_prompts_workers=1", *options]
    config = load_config(
        PPOConfig, [*command_of(ROOT / "examples" / f"{DATA_SETS[name].example}.sh"), *overrides]
    )
    model, media, processor = folder / "vl", None, None
    if "_vl_" in DATA_SETS[name].example:
        processor = load_processor(model)
        media = MediaLoader(processor, MediaOptions.from_data(config.data))
    dataset = RLHFDataset(config.data.train_files, load_tokenizer(model), processor, config.data, media=media)
    reward = config.worker.reward
    return dataset, load_reward_function(reward.reward_function, reward.reward_function_kwargs)


@pytest.mark.nightly("scripts", "examples")
@pytest.mark.parametrize("name", SOURCES)
def test_converted_ground_truths_get_the_full_score_in_the_example_run(
    name, folder, tmp_path, monkeypatch, capsys
):
    rows, features, answers = SOURCES[name]
    source = write_parquet(tmp_path / "train.parquet", rows, features)

    assert main([name, "--input", source, "--output", "out/train.parquet"]) == 0, capsys.readouterr().err
    command = capsys.readouterr().out.splitlines()[-1]
    dataset, reward = open_as_a_run_does(name, tmp_path / "out/train.parquet", folder, monkeypatch)
    items = [dataset[index] for index in range(len(dataset))]
    responses = [RESPONSES[reward.name].format(item["ground_truth"]) for item in items]
    scores = reward.score(
        [
            {"response": response, "response_length": 9, "ground_truth": item["ground_truth"]}
            for response, item in zip(responses, items, strict=True)
        ]
    )

    assert [item["ground_truth"] for item in items] == answers
    assert [score["overall"] for score in scores] == [1.0] * len(answers)
    assert f"bash examples/{DATA_SETS[name].example}.sh data.train_files=out/train.parquet" in command
    has_images = features is not None
    assert [item["multi_modal_data"] for item in items] == [
        {"images": [PNG["bytes"]], "videos": []} if has_images else None
    ] * len(answers)


def test_video_questions_with_reasoning_work_as_prompts_and_conversations(
    folder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "longvila_videos").mkdir()
    video = save_video(tmp_path / "longvila_videos" / "a.mp4", 56, 56, 8)
    other = longvideo_row(videos="longvila_videos/b.mp4")  # the same question: another problem, not there
    source = write_jsonl(tmp_path / "rows.jsonl", [longvideo_row(), longvideo_row(), other])

    assert main(["longvideo_reason", "--input", source, "--output", "train.parquet"]) == 0
    file = tmp_path / "train.parquet"
    skip = ("data.on_bad_row=skip", f"data.video_dir={tmp_path}")
    prompts, reward = open_as_a_run_does("longvideo_reason", file, folder, monkeypatch, *skip)
    (prompt,) = (prompts[index] for index in range(len(prompts)))
    options = SFTDataConfig(
        prompt_key="problem", format_prompt=str(ROOT / "examples/format_prompt/r1v.jinja"),
        on_bad_row="skip", video_dir=str(tmp_path), filter_overlong_prompts_workers=1,
    )  # fmt: skip
    rows = SFTDataset(str(file), prompts.tokenizer, prompts.processor, options, media=prompts.media)
    learned = rows[0]["input_ids"][rows[0]["is_trained"].bool()]

    assert "1 the same problem and answer as an earlier row" in capsys.readouterr().out
    assert len(prompts) == len(rows) == 1 and len(prompts.rows) == 2
    assert prompt["multi_modal_data"]["videos"] == [str(video)]
    text = prompts.tokenizer.decode(learned)
    assert text == "<think>They run. So B.</think><answer>B</answer><|im_end|>"
    response = {"response": text.removesuffix("<|im_end|>"), "response_length": 9, "ground_truth": "B"}
    assert reward.score([response])[0]["overall"] == 1.0


def test_each_problem_occurs_once_and_rows_left_out_are_counted_by_reason(tmp_path, capsys):
    rows = [{"question": f"{n}?", "answer": "#### 3"} for n in (1, 2, 1, 1)]  # "3": texts that Python shares
    rows += [{"question": "1?", "answer": "#### 4"}, {"question": "5?", "answer": "five"}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)

    assert main(["gsm8k", "--input", source, "--output", "a.parquet"]) == 0

    output = capsys.readouterr().out
    assert [(row["problem"], row["answer"]) for row in read("a.parquet")] == [("1?", "3"), ("2?", "3")]
    assert "4 rows are left out" in output
    assert f"2 {REPEATED}; the first is {source}, row 2" in output
    assert f"1 {CONTRADICTING}; the first is {source}, row 4" in output
    assert f"1 the answer has no result behind ####; the first is {source}, row 5" in output


def test_the_same_question_about_another_image_is_kept(tmp_path):
    images = [{"bytes": image_bytes(8, 8, seed), "path": None} for seed in (1, 2, 1)]
    rows = [{"images": [image], "problem": "<image>How many?", "answer": "3"} for image in images]
    source = write_parquet(tmp_path / "rows.parquet", rows, SOURCES["geoqa8k"][1])

    assert main(["clevr", "--input", source, "--output", "a.parquet"]) == 0

    assert [row.get("answer") for row in read("a.parquet")] == ["3", "3"]


def test_validation_rows_are_drawn_by_the_seed_and_are_in_one_file_only(tmp_path):
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(20)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    drawn = {}
    for folder, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        switches = ["--val-rows", "5", "--seed", seed, "--output", f"{folder}/train.parquet"]
        assert main(["gsm8k", "--input", source, *switches]) == 0
        train, val = read(f"{folder}/train.parquet"), read(f"{folder}/val.parquet")
        assert len(val) == 5
        assert sorted(int(row["answer"]) for row in train + val) == list(range(20))
        drawn[folder] = [row["answer"] for row in val]

    assert drawn["a"] == drawn["b"] != drawn["c"]


def test_images_by_path_are_stored_as_bytes_over_several_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.data_preprocess.common.ROW_GROUP_BYTES", 3000)
    contents = [image_bytes(20, 20, seed) for seed in range(5)]  # some 1.2 kB each
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    rows = [{"images": [f"{n}.png"], "problem": "<image>?", "answer": str(n)} for n in range(6)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    monkeypatch.chdir(ROOT)

    output = tmp_path / "a.parquet"
    assert main(["clevr", "--input", source, "--output", str(output), "--image-dir", str(tmp_path)]) == 0

    assert parquet.ParquetFile(output).metadata.num_row_groups == 2
    table = datasets.Dataset.from_parquet(str(output)).cast_column(
        "images", datasets.List(datasets.Image(decode=False))
    )
    assert [row["images"][0]["bytes"] for row in table] == contents


def test_a_missing_column_is_an_error_with_found_and_needed(tmp_path, capsys):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"question": "1?", "result": "1"}])

    assert main(["gsm8k", "--input", source, "--output", "a.parquet"]) == 1

    assert (
        f"`--input`: {source} has no column `answer`: gsm8k needs `question`, `answer`, found `question`,"
        " `result`" in capsys.readouterr().err
    )
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--output", "a.json"], "`--output` must end in .parquet, got a.json"),
        (["--output", "val.parquet", "--val-rows", "1"], "another file than val.parquet"),
        (["--output", "a.parquet", "--val-rows", "-1"], "`--val-rows` (-1) must be at least 0"),
        (["--output", "a.parquet", "--val-rows", "1"], "`--val-rows` (1) must be less than the rows"),
        (["--output", "a.parquet", "--input", "none.jsonl"], "`--input`: no file or directory none.jsonl"),
        (["--output", "a.parquet", "--input", "bad.jsonl"], "none of the rows of bad.jsonl can be used"),
    ],
)
def test_wrong_switches_are_reported_and_nothing_is_written(switches, message, tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "1?", "answer": "#### 1"}])
    write_jsonl(tmp_path / "bad.jsonl", [{"question": "1?", "answer": "1"}])

    assert main(["gsm8k", "--input", "rows.jsonl", *switches]) == 1

    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "rows.jsonl"]


def test_no_file_is_replaced_before_all_are_written(tmp_path):
    rows = [{"problem": f"{n}?", "answer": str(n)} for n in range(3)]
    files = {tmp_path / "train.parquet": [0, 1], tmp_path / "val.parquet": [2, 3]}
    for path in files:
        path.write_text("old")

    with pytest.raises(IndexError):  # there is no row 3
        write_files(files, {"problem", "answer"}, lambda index: rows[index])

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "train.parquet": "old",
        "val.parquet": "old",
    }


def test_the_right_subset_of_a_data_set_is_read_from_the_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            file = repository / "snapshots" / ("1" * 40) / subset / f"{split}-00000-of-00001.parquet"
            write_parquet(file, [{"question": f"{subset} {split}?", "answer": "#### 1"}])

    assert main(["gsm8k", "--input", "openai/gsm8k@test", "--output", "a.parquet"]) == 0

    assert [row["problem"] for row in read("a.parquet")] == ["main test?"]


def test_an_unreachable_hub_is_an_error_that_names_the_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    assert main(["gsm8k", "--input", "openai/gsm8k@train", "--output", "a.parquet"]) == 1

    assert "`--input`: openai/gsm8k is not a local file or directory" in capsys.readouterr().err


def test_the_list_names_every_data_set_its_columns_and_an_existing_example(capsys):
    assert main(["--list"]) == 0

    listed = capsys.readouterr().out
    for name in DATA_SETS:
        assert f"{name}: {DATA_SETS[name].summary}" in listed
        assert all(hub_name in listed for hub_name in DATA_SETS[name].hub_names)
        assert (ROOT / "examples" / f"{DATA_SETS[name].example}.sh").exists()
