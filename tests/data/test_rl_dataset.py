# SPDX-License-Identifier: Apache-2.0
"""From rows to prompts: markers, templates, chats, lengths, bad rows."""

import base64
import csv
import json
import os
import re
import signal
from functools import partial

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig

from tests.helpers.media import image_bytes, save_image, save_video
from tests.helpers.nightly import by_day
from verl.config.ppo import DataConfig
from verl.config.sft import SFTDataConfig
from verl.data.bad_rows import BadRow, BadRowError
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.messages import references
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.data.row_readers import scan_rows
from verl.data.sft_dataset import SFTDataset
from verl.models.families.registry import family_of
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module", params=by_day(["qwen2_5_vl", "qwen3_vl"], "qwen2_5_vl"))
def media_model(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def make_config(**options):
    defaults = dict(
        prompt_key="problem", max_prompt_length=128, min_pixels=40 * 40, max_pixels=100 * 100,
        filter_overlong_prompts=True, filter_overlong_prompts_workers=1,
    )  # fmt: skip
    return DataConfig(**(defaults | options))


def write(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return str(folder / name)


def open_text(model, folder, rows, **options):
    return RLHFDataset(write(folder, rows), load_tokenizer(model), None, make_config(**options))


def open_media(model, files, row_timeout_s=60.0, report=None, **options):
    config, processor = make_config(**options), load_processor(model)
    hf_config = AutoConfig.from_pretrained(model)
    positions = partial(family_of(hf_config).positions, hf_config)
    media = MediaLoader(processor, MediaOptions.from_data(config))
    return RLHFDataset(
        files, load_tokenizer(model), processor, config, media=media, position_ids=positions,
        row_timeout_s=row_timeout_s, report=report,
    )  # fmt: skip


def test_a_text_row_becomes_a_left_padded_prompt_with_all_its_columns(text_model, tmp_path):
    rows = [{"problem": "1 + 1?", "answer": "2", "level": 3}]
    rows.append({"problem": "one?", "answer": "1", "extra": [1, [2]]})

    dataset = open_text(text_model, tmp_path, rows, max_prompt_length=64)
    batch = DataProto.from_single_dict(collate_fn([dataset[0], dataset[1]]))

    text = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    ids = dataset.tokenizer.encode(text, add_special_tokens=False)
    padding = 64 - len(ids)
    assert batch.non_tensor_batch["prompt_text"][0] == text
    assert batch.non_tensor_batch["raw_prompt_ids"][0] == ids
    assert batch.batch["prompts"][0].tolist() == [dataset.tokenizer.pad_token_id] * padding + ids
    assert batch.batch["prompt_mask"][0].tolist() == [0] * padding + [1] * len(ids)
    assert batch.batch["prompt_position_ids"][0].tolist() == [0] * padding + list(range(len(ids)))
    assert batch.non_tensor_batch["ground_truth"].tolist() == ["2", "1"]
    assert batch.non_tensor_batch["problem"].tolist() == ["1 + 1?", "one?"]
    assert batch.non_tensor_batch["answer"].tolist() == ["2", "1"]
    assert batch.non_tensor_batch["level"].tolist() == [3, None]
    assert batch.non_tensor_batch["extra"].tolist() == [None, [1, [2]]]
    assert batch.non_tensor_batch["multi_modal_data"].tolist() == [None, None]
    batch.check()


QWEN3 = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif -%}"""


def open_qwen3(kind, model, folder, rows, config):
    (folder / "qwen3.jinja").write_text(QWEN3)
    tokenizer = load_tokenizer(model, override_chat_template=str(folder / "qwen3.jinja"))
    return kind(write(folder, rows), tokenizer, None, config)


def test_variables_of_the_chat_template_reach_every_prompt_and_its_length(text_model, tmp_path):
    rows = [{"problem": "1 + 1?", "answer": "2"}]
    off = {"enable_thinking": False}
    asked = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"

    thinks = open_qwen3(RLHFDataset, text_model, tmp_path, rows, make_config())
    answers = open_qwen3(RLHFDataset, text_model, tmp_path, rows, make_config(apply_chat_template_kwargs=off))

    assert thinks[0]["prompt_text"] == asked
    assert answers[0]["prompt_text"] == asked + "<think>\n\n</think>\n\n"
    assert answers.lengths == [len(answers[0]["raw_prompt_ids"])] and answers.lengths > thinks.lengths


def test_variables_of_the_chat_template_reach_conversations(text_model, tmp_path):
    # The thoughts belong to the prompt if they are turned off, so only the answer is trained on.
    rows = [{"prompt": "1 + 1?", "response": "2"}]
    learned = {}
    for name, variables in (("thinks", {}), ("answers", {"enable_thinking": False})):
        config = SFTDataConfig(filter_overlong_prompts_workers=1, apply_chat_template_kwargs=variables)
        dataset = open_qwen3(SFTDataset, text_model, tmp_path, rows, config)
        item = dataset[0]
        learned[name] = dataset.tokenizer.decode(item["input_ids"][item["is_trained"].bool()])

    assert learned == {"thinks": "<think>\n\n</think>\n\n2<|im_end|>", "answers": "2<|im_end|>"}


def test_a_variable_that_the_chat_template_does_not_read_is_an_error(text_model, tmp_path):
    config = make_config(apply_chat_template_kwargs={"enable_thinkng": False})

    with pytest.raises(
        ValueError, match=r"apply_chat_template_kwargs` sets 'enable_thinkng', which the chat"
    ):
        open_qwen3(RLHFDataset, text_model, tmp_path, [{"problem": "a", "answer": "b"}], config)


def test_one_file_may_mix_rows_with_images_videos_both_and_neither(media_model, tmp_path):
    image, video = save_image(tmp_path / "a.png", 60, 50), save_video(tmp_path / "a.mp4", 56, 56, 8)
    rows = [
        {"problem": "text only", "answer": "a", "images": None, "videos": []},
        {"problem": "<image>what?", "answer": "b", "images": ["a.png"]},
        {"problem": "see <video> then <image>", "answer": "c", "images": ["a.png"], "videos": [video]},
        {"problem": "<video>?", "answer": "d", "images": [], "videos": ["a.mp4"]},
    ]

    dataset = open_media(media_model, write(tmp_path, rows), image_dir=str(tmp_path), max_prompt_length=256)
    batch = DataProto.from_single_dict(collate_fn([dataset[index] for index in range(4)]))

    refs = batch.non_tensor_batch["multi_modal_data"]
    assert refs[0] is None
    assert refs[1] == {"images": [image], "videos": []} and refs[2] == {"images": [image], "videos": [video]}
    assert batch.batch["prompt_position_ids"].shape == (4, 4, 256)
    processor = dataset.processor
    for row in range(1, 4):
        decoded = dataset.media.decode(refs[row])
        given = {"images": decoded.images} if decoded.images else {}
        if decoded.videos:
            metas = [{k: v for k, v in meta.items() if k != "do_sample_frames"} for _, meta in decoded.videos]
            frames = [frames for frames, _ in decoded.videos]
            given |= {"videos": frames, "video_metadata": metas, "do_sample_frames": False}
        text = batch.non_tensor_batch["prompt_text"][row]
        expected = processor(text=[text], **given)["input_ids"][0]
        assert batch.batch["prompts"][row][batch.batch["prompt_mask"][row].bool()].tolist() == list(expected)
        raw = batch.non_tensor_batch["raw_prompt_ids"][row]
        assert raw == processor.tokenizer.encode(text, add_special_tokens=False)
        assert raw.count(processor.image_token_id) == len(refs[row]["images"])
    batch.check()


def test_chat_messages_keep_their_system_and_earlier_turns(media_model, tmp_path):
    save_image(tmp_path / "a.png", 60, 50)
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>first"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and this?"}]},
    ]
    rows = [{"problem": prompt, "answer": "b", "images": ["a.png", "a.png"]}]

    dataset = open_media(media_model, write(tmp_path, rows), image_dir=str(tmp_path))

    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert dataset[0]["prompt_text"] == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{image}first<|im_end|>\n"
        f"<|im_start|>assistant\nred<|im_end|>\n<|im_start|>user\n{image}and this?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_images_may_be_paths_bytes_or_dictionaries(media_model, tmp_path):
    import datasets

    content = image_bytes(60, 50)
    path = save_image(tmp_path / "a.png", 60, 50)
    table = datasets.Dataset.from_dict(
        {"problem": ["<image>"] * 2, "answer": ["a", "b"], "images": [[{"bytes": content, "path": None}]] * 2}
    )
    table.to_parquet(str(tmp_path / "a.parquet"))
    lines = write(tmp_path, [{"problem": "<image>", "answer": "c", "images": path}])

    dataset = open_media(media_model, [str(tmp_path / "a.parquet"), lines])

    assert [item["multi_modal_data"]["images"] for item in (dataset[0], dataset[2])] == [[content], [path]]
    assert torch.equal(dataset[0]["prompts"], dataset[2]["prompts"])


def test_options_of_single_media_in_a_row_count_for_its_length_and_travel_with_it(media_model, tmp_path):
    image, video = save_image(tmp_path / "a.png", 600, 500), save_video(tmp_path / "a.mp4", 56, 56, 40)
    small = {"image": "a.png", "max_pixels": 50 * 50, "min_pixels": None}
    few = {"type": "video", "video": "a.mp4", "nframes": 4}
    rows = [
        {"problem": "<image><video>?", "answer": "a", "images": ["a.png"], "videos": ["a.mp4"]},
        {"problem": "<image><video>?", "answer": "a", "images": [small], "videos": [few]},
    ]

    dataset = open_media(media_model, write(tmp_path, rows), image_dir=str(tmp_path), max_prompt_length=512)

    plain, ours = dataset[0], dataset[1]
    assert ours["multi_modal_data"] == {
        "images": [{"path": image, "max_pixels": 2500}],
        "videos": [{"path": video, "nframes": 4}],
    }
    assert dataset.lengths == [int(item["prompt_mask"].sum()) for item in (plain, ours)]
    assert dataset.lengths[1] < dataset.lengths[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_pixels": 9}, r"the video has \['total_pixels'\], which have no effect here.*'video_end'"),
        ({"min_pixel": 9}, r"\['min_pixel'\]"),
        ({"fps": 0}, "`fps` of the video must be a positive number, got 0"),
        ({"nframes": 4.5}, "`nframes` of the video must be a whole number from 1 up, got 4.5"),
        ({"nframes": 5}, r"an odd `nframes` \(5\)"),
        ({"nframes": 4, "fps": 1}, r"`nframes`, which leaves \['fps'\] without effect"),
        ({"min_pixels": 9, "max_pixels": 4}, r"a `min_pixels` \(9\) above its `max_pixels` \(4\)"),
        ({"video_start": 3, "video_end": 2}, r"a `video_start` \(3.0\) above its `video_end`"),
        ({"resized_height": 56}, "only one of `resized_height` and `resized_width`"),
    ],
)
def test_an_option_of_a_medium_that_is_not_honored_is_named(options, message):
    with pytest.raises(BadRowError, match=message):
        references([{"video": "a.mp4"} | options], "video", None)


def test_an_image_has_no_frames():
    with pytest.raises(BadRowError, match=r"the image has \['fps'\], which have no effect"):
        references([{"path": "a.png", "fps": 1.0}], "image", None)


def test_the_template_sees_the_prompt_as_content_and_every_column(text_model, tmp_path):
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ content | trim }} ({{ level }}{% if hint is defined %}, {{ hint }}{% endif %})\n")
    rows = [{"problem": " 1? ", "answer": "1", "level": "easy"}]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "2?"}]
    rows.append({"problem": chat, "answer": "2", "level": "hard", "hint": "even"})

    dataset = open_text(text_model, tmp_path, rows, format_prompt=str(template))

    assert "<|im_start|>user\n1? (easy)<|im_end|>" in dataset[0]["prompt_text"]
    assert "user\n2? (hard, even)<|im_end|>" in dataset[1]["prompt_text"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ absent }}", "'absent' is undefined"),
        ("{{ content.__class__.__mro__ }}", "unsafe"),
        ("{{ content", "prompt.jinja\\), line 1"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_named(template, message, text_model, tmp_path):
    (tmp_path / "prompt.jinja").write_text(template)
    rows = [{"problem": "1?", "answer": "1"}]

    with pytest.raises(ValueError, match=message):
        open_text(text_model, tmp_path, rows, format_prompt=str(tmp_path / "prompt.jinja"))


def test_the_chat_template_can_be_replaced(text_model, media_model, tmp_path):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} >"
    (tmp_path / "chat.jinja").write_text(template)

    for load in (load_tokenizer, load_processor):
        loaded = load(media_model, str(tmp_path / "chat.jinja"))
        assert loaded.chat_template.startswith("{% for m in messages %}[")
    tokenizer = load_tokenizer(text_model, str(tmp_path / "chat.jinja"))
    rows = write(tmp_path, [{"problem": "hi", "answer": "1"}])
    assert RLHFDataset(rows, tokenizer, None, make_config())[0]["prompt_text"] == "[user] hi >"


def test_a_text_model_has_no_processor(text_model):
    assert load_processor(text_model) is None


def test_markers_are_plain_text_to_a_model_that_reads_no_media(text_model, tmp_path):
    dataset = open_text(text_model, tmp_path, [{"problem": "what is <video> in HTML?", "answer": "a tag"}])

    assert "what is <video> in HTML?" in dataset[0]["prompt_text"]


@pytest.mark.parametrize(
    ("without", "with_markers"),
    [
        ("Which?", "<image><image>Which?"),
        (
            [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}],
            [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image><image>Which?"}],
        ),
    ],
)
def test_the_media_of_a_prompt_without_any_marker_come_before_its_text(
    without, with_markers, media_model, tmp_path
):
    images = [str(save_image(tmp_path / f"{name}.png", 60, 50)) for name in "ab"]
    rows = [{"problem": problem, "images": images, "answer": "1"} for problem in (without, with_markers)]

    first, second = open_media(media_model, write(tmp_path, rows))

    assert first["prompt_text"] == second["prompt_text"]
    assert first["prompts"].tolist() == second["prompts"].tolist()
    assert first["prompt_messages"] == second["prompt_messages"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "<image><image>", "images": ["a.png"]}, "2 <image> but the row has 1 images in column"),
        (
            {"problem": "<video>", "images": ["a.png"], "videos": ["a.mp4"]},
            "0 <image> but the row has 1 images",
        ),
        ({"problem": "<video>"}, "row has 0 videos in column `videos` \\(`data.video_key`\\)"),
        ({"problem": "<image>", "images": ["absent.png"]}, "absent.png cannot be read"),
        ({"problem": "<image>", "images": ["notes.txt"]}, "notes.txt cannot be read"),
        ({"problem": "<image>", "images": [7]}, "must be paths, bytes"),
        ({"problem": "<image>", "images": ["https://x.org/a.png"]}, "is on the web"),
        ({"problem": 7}, "must be a string or a list"),
        ({"problem": [{"role": "robot", "content": "x"}]}, "message 0 must be"),
        ({"problem": [{"role": "assistant", "content": "y"}]}, "the last message"),
    ],
)
def test_an_unusable_row_is_an_error_that_names_file_row_and_reason(row, message, media_model, tmp_path):
    save_image(tmp_path / "a.png", 60, 50)
    (tmp_path / "notes.txt").write_text("no image")
    files = write(tmp_path, [{"problem": "fine", "answer": "1"}, {"answer": "2", **row}])

    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1: .*{message}(.|\n)*data.on_bad_row=skip"):
        open_media(media_model, files, image_dir=str(tmp_path))

    dataset = open_media(media_model, files, image_dir=str(tmp_path), on_bad_row="skip")
    assert len(dataset) == 1 and [bad.index for bad in dataset.bad_rows] == [1]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pa.array([0, -800000, 1], pa.date32()), "column `when`: date value out of range; dates must be"),
        (pa.array([[0], [1 << 40], []], pa.list_(pa.timestamp("s"))), "column `when`: date value out of"),
        (pa.array([0, 1 << 60, 1], pa.duration("s")), "column `when`: Python int too large"),
    ],
)
def test_a_value_that_only_arrow_can_hold_makes_a_bad_row(values, reason, text_model, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"problem": ["a", "b", "c"], "answer": ["1", "2", "3"], "when": values}), path)
    open_rows = partial(RLHFDataset, str(path), load_tokenizer(text_model), None)

    with pytest.raises(ValueError, match=rf"rows\.parquet, row 1: {reason}"):
        open_rows(make_config())
    skipping = open_rows(make_config(on_bad_row="skip"))
    assert skipping.indices == [0, 2] and [row.index for row in skipping.bad_rows] == [1]


def test_a_missing_column_is_named_with_the_existing_ones_and_the_option(text_model, tmp_path):
    message = (
        r"rows.jsonl has no column `problem`: it has \['answer', 'question'\]; set `data.prompt_key=question`"
    )
    with pytest.raises(ValueError, match=message):
        open_text(text_model, tmp_path, [{"question": "1?", "answer": "1"}])


def test_a_column_named_like_a_batch_key_is_renamed(text_model, tmp_path):
    files = write(tmp_path, [{"problem": "1?", "answer": "1", "uid": 7, "prompts": "x"}])

    item = RLHFDataset(files, load_tokenizer(text_model), None, make_config(), reserved={"uid"})[0]

    assert item["uid_column"] == 7 and item["prompts_column"] == "x" and "uid" not in item


def test_prompts_that_are_too_long_are_filtered_by_their_expanded_length(media_model, tmp_path):
    save_image(tmp_path / "small.png", 60, 50)
    save_image(tmp_path / "large.png", 700, 700)
    rows = [{"problem": "<image>", "answer": "a", "images": [f"{size}.png"]} for size in ("small", "large")]

    dataset = open_media(media_model, write(tmp_path, rows), image_dir=str(tmp_path), max_prompt_length=1000)
    lengths = [int(dataset[index]["prompt_mask"].sum()) for index in range(2)]
    for limit, kept in ((lengths[1], 2), (lengths[1] - 1, 1), (lengths[0], 1)):
        options = dict(image_dir=str(tmp_path), max_prompt_length=limit)
        dataset = open_media(media_model, write(tmp_path, rows), **options)
        assert (len(dataset), dataset.num_overlong) == (kept, 2 - kept)


def test_a_long_prompt_without_the_filter_is_a_bad_row_and_never_truncated(text_model, tmp_path):
    rows = [{"problem": "1 2 3 " * 50, "answer": "1"}]
    options = dict(filter_overlong_prompts=False, max_prompt_length=32)

    bad = open_text(text_model, tmp_path, rows, **options)[0]

    assert isinstance(bad, BadRow)
    assert re.search(r"row 0: the prompt has \d+ tokens, `data.max_prompt_length` is 32", str(bad))


def test_filtering_every_row_is_an_error(text_model, tmp_path):
    with pytest.raises(ValueError, match="1 rows and none can be used: 1 prompts are longer"):
        open_text(text_model, tmp_path, [{"problem": "1 2 3 " * 50, "answer": "1"}], max_prompt_length=32)


def test_a_picture_that_turns_out_corrupt_when_decoded_is_a_bad_row(media_model, tmp_path):
    (tmp_path / "cut.png").write_bytes(image_bytes(90, 90)[:3000])  # its header is whole
    files = write(tmp_path, [{"problem": "<image>", "answer": "a", "images": ["cut.png"]}])

    bad = open_media(media_model, files, image_dir=str(tmp_path))[0]

    assert isinstance(bad, BadRow) and bad.index == 0
    assert re.search(r"rows.jsonl, row 0: the image .*cut.png cannot be read", str(bad))


def square(row):
    return row * row


def inverse(row):
    return 1 / row


def test_rows_are_scanned_in_order_by_several_processes():
    assert scan_rows(square, 1003, 4, rows_for_one=10) == [index * index for index in range(1003)]


def die_at(row):
    if row == 500:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def test_a_scan_whose_process_dies_says_how_far_it_came():
    with pytest.raises(RuntimeError, match=r"first row that was not checked is \d+ .*prompts_workers"):
        scan_rows(die_at, 1003, 2, rows_for_one=10)


@pytest.mark.nightly
def test_a_scan_ends_also_where_this_process_does_not_die_of_sigterm():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # forked processes inherit it
    try:
        assert scan_rows(square, 1003, 2, rows_for_one=10)[-1] == 1002**2
        for _ in range(10):  # the first error may come before the last process has begun
            with pytest.raises(ZeroDivisionError):
                scan_rows(inverse, 1003, 2, rows_for_one=10)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_scan_by_several_processes_finds_what_one_finds(media_model, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.data.dataset.MEDIA_ROWS_FOR_ONE_PROCESS", 1)
    save_image(tmp_path / "a.png", 60, 50)
    rows = [{"problem": "<image>" * (n % 3), "answer": "a", "images": ["a.png"] * (n % 2)} for n in range(24)]
    options = dict(image_dir=str(tmp_path), on_bad_row="skip")

    one, two = (
        open_media(media_model, write(tmp_path, rows), filter_overlong_prompts_workers=workers, **options)
        for workers in (1, 2)
    )

    assert one.indices == two.indices and one.bad_rows == two.bad_rows and len(one.bad_rows) == 12


def test_opening_a_data_set_renders_each_row_at_most_once(text_model, tmp_path, monkeypatch):
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(100)]
    rendered, render = [], RLHFDataset.render
    monkeypatch.setattr(RLHFDataset, "render", lambda self, row: rendered.append(row) or render(self, row))

    dataset = RLHFDataset(write(tmp_path, rows), load_tokenizer(text_model), None, make_config())

    assert len(dataset) == 100 and len(rendered) <= 100


@pytest.mark.parametrize(("kind", "order"), [("internvl", ["video", "image"]), ("llava_onevision", None)])
def test_a_row_with_both_kinds_names_their_order_where_features_depend_on_it(kind, order, tmp_path):
    save_image(tmp_path / "a.png", 60, 60)
    save_video(tmp_path / "b.mp4", 64, 64, 8)
    rows = [{"problem": "<video>then<image>?", "answer": "a", "images": ["a.png"], "videos": ["b.mp4"]}]
    model = str(save_tiny_model(tmp_path / kind, kind))

    dataset = open_media(model, write(tmp_path, rows), image_dir=str(tmp_path), max_prompt_length=512)
    media = dataset[0]["multi_modal_data"]

    assert media.get("order") == order
    kinds = [medium.kind for medium in dataset.media.media(media)]
    assert kinds == (order or ["image", "video"])


def test_a_prompt_of_which_the_template_leaves_out_a_call_is_a_bad_row(text_model, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    told = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [{"problem": [*told, {"role": "tool", "content": "1"}], "answer": "1"}]

    with pytest.raises(ValueError, match="does not show the call of `add` of message 1, of the assistant"):
        RLHFDataset(write(tmp_path, rows), load_tokenizer(text_model), None, make_config())


@pytest.mark.parametrize("roles", [("role", "content"), ("from", "value")])
def test_a_chat_as_json_is_a_chat_and_a_list_of_other_objects_is_text(roles, text_model, tmp_path):
    role, content = roles
    chat = [{role: "system", content: "Be brief."}, {role: "user", content: "1 + 1?"}]
    table = '[{"price": 3}] Which price?'
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["problem", "answer"], [json.dumps(chat), "2"], [table, "3"]])

    dataset = RLHFDataset(str(tmp_path / "rows.csv"), load_tokenizer(text_model), None, make_config())

    first, second = dataset[0]["prompt_messages"], dataset[1]["prompt_messages"]
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    assert second == [{"role": "user", "content": table}]


def test_an_image_that_a_row_holds_as_base64_is_its_bytes(tmp_path):
    save_image(tmp_path / "a.png", 60, 50)
    content = (tmp_path / "a.png").read_bytes()
    plain = base64.b64encode(content).decode()
    lines = "\n".join(plain[start : start + 76] for start in range(0, len(plain), 76))

    for given in (f"data:image/png;base64,{plain}", plain, lines, {"bytes": plain}, {"bytes": lines}):
        assert references(given, "image", "/images") == [content]
    assert references("data/" + "a" * 60, "image", "/images") == ["/images/data/" + "a" * 60]


@pytest.mark.parametrize(
    "given", ["data:image/png;base64,iVBORw0KGgo", "data:image/png,%89PNG", {"bytes": "iVBORw0KGg!"}]
)
def test_damaged_base64_is_a_short_reason(given):
    with pytest.raises(BadRowError, match=r"the image of a row cannot be read: (its|a data URL)") as error:
        references(given, "image", None)

    assert len(str(error.value)) < 200
