# SPDX-License-Identifier: Apache-2.0
"""The folder of downloads: each file is fetched once, the folder is bounded, rows work like rows of files."""

import json
import multiprocessing
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from tests.data.test_rl_dataset import open_media, write
from tests.helpers.file_server import FileServer, content, in_turn, status
from tests.helpers.grids import inputs_of
from tests.helpers.media import image_bytes, save_video
from verl.config.ppo import DataConfig
from verl.data.bad_rows import BadRow, BadRowReport
from verl.data.media.download import DownloadFolder
from verl.data.media.references import is_url
from verl.data.media.sizes import DownloadOptions
from verl.data.rl_dataset import collate_fn
from verl.models.tiny import save_tiny_model

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def media_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


def open_folder(path, run_id="run", max_bytes=None):
    options = DownloadOptions(("127.0.0.1",), 20.0, 1 << 20, str(path))
    return DownloadFolder(options, run_id, max_bytes)


def files_in(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def test_a_url_has_a_scheme_other_than_file():
    assert all(map(is_url, ["http://x/a", "HTTPS://x/a", "ftp://x/a", "s3://x/a"]))
    assert not any(map(is_url, ["/a/b.png", "a.png", "file:///a.png", "FILE:///a.png", b"a://b"]))


def test_a_file_is_fetched_once_and_kept_for_later_runs(tmp_path):
    with FileServer(a=b"here") as server:
        first = open_folder(tmp_path).path(server.url("a"))
        later = open_folder(tmp_path, run_id="another").path(server.url("a"))

        assert first == later and Path(first).read_bytes() == b"here"
        assert server.asked == {"a": 1} and files_in(tmp_path) == [Path(first)]


def test_concurrent_processes_fetch_a_file_once(tmp_path):
    gate, waiting = threading.Event(), FORK.Barrier(5)

    def slowly(handler):
        gate.wait(120)
        content(b"here")(handler)

    def want(url, results):
        waiting.wait(120)
        results.put(Path(open_folder(tmp_path).path(url)).read_bytes())

    with FileServer(a=slowly) as server:
        results = FORK.Queue()
        wanting = [FORK.Process(target=want, args=(server.url("a"), results)) for _ in range(4)]
        for process in wanting:
            process.start()
        waiting.wait(120)
        threading.Timer(0.3, gate.set).start()

        assert [results.get(timeout=120) for _ in wanting] == [b"here"] * 4
        for process in wanting:
            process.join()
        assert server.asked == {"a": 1}


def test_a_failed_url_is_requested_again_only_by_the_next_run(tmp_path):
    with FileServer(a=in_turn(status(404), content(b"mended"))) as server:
        url = server.url("a")
        for _ in range(3):  # a folder of each, as in the processes of a run
            with pytest.raises(ValueError, match=f"{url} was not fetched: 127.0.0.1 answered 404 Not Found"):
                open_folder(tmp_path).path(url)

        assert server.asked == {"a": 1}
        assert Path(open_folder(tmp_path, run_id="next").path(url)).read_bytes() == b"mended"
        assert len(files_in(tmp_path)) == 1


def test_a_failed_download_leaves_no_partial_file(tmp_path):
    with (
        FileServer(a=content(b"x" * 2_000_000)) as server,
        pytest.raises(ValueError, match=r"larger than `data.media_url_max_mb` \(1\)"),
    ):
        open_folder(tmp_path).path(server.url("a"))

    assert [path.suffix for path in files_in(tmp_path)] == [".failed"]


def test_files_unread_for_longest_are_removed_first_and_reading_keeps_the_content_id(tmp_path):
    # Ten files of 1,000 bytes; the bound leaves 15/16 of 5,000 bytes, so four beside the one that comes.
    with FileServer(**{f"n{number}": bytes([number]) * 1000 for number in range(10)}) as server:
        folder = open_folder(tmp_path, max_bytes=5000)
        kept = Path(folder.path(server.url("n0")))
        os.utime(kept, (0, 0))
        paths = [kept]
        for number in range(1, 10):
            paths.append(Path(folder.path(server.url(f"n{number}"))))
            os.utime(paths[-1], (number, number))
            folder.path(server.url("n0"))  # reading renews it

        assert [number for number, path in enumerate(paths) if path.exists()] == [0, 7, 8, 9]
        assert kept.stat().st_mtime_ns == 0 and server.asked["n0"] == 1
        assert Path(folder.path(server.url("n1"))).read_bytes() == b"\x01" * 1000  # fetched again


def test_a_full_folder_is_named_and_is_not_a_bad_row(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    (tmp_path / "full").symlink_to("/dev/full")
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, *args, **kwargs: opened(
            tmp_path / "full" if path.suffix == ".tmp" else path, *args, **kwargs
        ),
    )

    with (
        FileServer(a=b"x" * 1000) as server,
        pytest.raises(RuntimeError, match=rf"`data.media_url_dir` \({tmp_path}\) .*No space left"),
    ):
        folder.path(server.url("a"))


def test_the_default_folder_is_private_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = f"verl-media-urls-{os.getuid()}"

    assert DownloadFolder(DownloadOptions(), "run").directory == tmp_path / name
    (tmp_path / name).chmod(0o777)
    with pytest.raises(RuntimeError, match="is not private to this user: set"):
        DownloadFolder(DownloadOptions(), "run")

    (tmp_path / name).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="is not private to this user"):
        DownloadFolder(DownloadOptions(), "run")


# --- rows


def with_urls(folder, **options):
    return dict(
        allow_media_urls=True, media_url_hosts=("127.0.0.1",), media_url_dir=str(folder / "fetched"),
        media_url_timeout_s=20.0, media_url_max_mb=1, max_prompt_length=256, on_bad_row="skip",
    ) | options  # fmt: skip


def test_rows_with_urls_give_the_same_prompts_and_features_as_rows_with_files(media_model, tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(60, 50))
    save_video(tmp_path / "a.mp4", 56, 56, 8)
    files = {"png": (tmp_path / "a.png").read_bytes(), "mp4": (tmp_path / "a.mp4").read_bytes()}
    with FileServer(**files) as server:
        image, video = server.url("png"), server.url("mp4")

        def rows(image, video):
            return [
                {"problem": "<image>?", "answer": "a", "images": [image]},
                {"problem": "<video> <image>", "answer": "b", "images": {"path": image}, "videos": video},
            ]

        by_url = open_media(
            media_model, write(tmp_path, rows(image, video), "urls.jsonl"), **with_urls(tmp_path)
        )
        local = rows(str(tmp_path / "a.png"), str(tmp_path / "a.mp4"))
        by_path = open_media(media_model, write(tmp_path, local), max_prompt_length=256)
        ours, theirs = (collate_fn([dataset[0], dataset[1]]) for dataset in (by_url, by_path))

        for name in ("prompts", "prompt_mask", "prompt_position_ids"):
            assert torch.equal(ours[name], theirs[name])
        assert ours["multi_modal_data"][1] == {"images": [image], "videos": [video]}
        for row in (0, 1):
            made = inputs_of(by_url.media, ours["multi_modal_data"][row])
            expected = inputs_of(by_path.media, theirs["multi_modal_data"][row])
            assert list(made) == list(expected)
            assert all(torch.equal(made[name], expected[name]) for name in expected)
        assert by_url.media.feature_key("image", image) != by_url.media.feature_key("video", video)
        assert server.asked == {"png": 1, "mp4": 1}


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize("filter_first", [True, False], ids=["when checked", "when read"])
def test_rows_that_cannot_be_fetched_are_listed_with_row_column_url_and_reason(
    filter_first, media_model, tmp_path
):
    page = content(b"sign in", Content_Type="text/html")
    with FileServer(good=image_bytes(60, 50), page=page, text=b"no image") as server:
        server.answers["list"] = PLAYLIST.format(url=server.url("secret")).encode()
        reasons = {  # of the rows 1 to 6
            server.url("gone"): "column `images`: URL was not fetched: 127.0.0.1 answered 404 Not Found",
            server.url("page"): "column `images`: URL was not fetched: 127.0.0.1 sent a web page",
            server.url("text"): "the image URL cannot be read: UnidentifiedImageError: .*",
            "http://10.0.0.1/a": "column `images`: URL was not fetched: 10.0.0.1 is not one of .*",
            "ftp://127.0.0.1/a": "column `images`: URL was not fetched: ftp is not http or https, in .*",
            server.url("list"): "the video URL cannot be read: .*",  # it asks for nothing that it names
        }
        rows = [{"problem": "<image>?", "answer": 0, "images": url} for url in (server.url("good"), *reasons)]
        rows[6] = {"problem": "<video>?", "answer": 0, "videos": server.url("list")}
        report = BadRowReport(tmp_path / "bad_rows.jsonl")

        options = with_urls(tmp_path, filter_overlong_prompts=filter_first)
        dataset = open_media(media_model, write(tmp_path, rows), report=report, **options)
        for _ in range(2):  # epochs
            items = [dataset[index] for index in range(len(dataset))]
            report.add(item for item in items if isinstance(item, BadRow))

        listed = [json.loads(line) for line in report.path.read_text().splitlines()]
        assert [entry["row"] for entry in listed] == [1, 2, 3, 4, 5, 6]
        for entry, (url, reason) in zip(listed, reasons.items(), strict=True):
            assert re.fullmatch(reason.replace("URL", re.escape(url)), entry["reason"], re.DOTALL)
        assert server.asked == {"good": 1, "gone": 1, "page": 1, "text": 1, "list": 1}


def test_a_url_without_the_option_is_a_bad_row_that_names_it(media_model, tmp_path):
    rows = [{"problem": "<image>?", "answer": "a", "images": "http://127.0.0.1:1/a.png"}]

    with pytest.raises(ValueError, match=r"row 0: http://127.0.0.1:1/a.png .*`data.allow_media_urls=true`"):
        open_media(media_model, write(tmp_path, rows))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(media_url_hosts=("a.org",)), "need `data.allow_media_urls=true`"),
        (dict(media_url_dir="/x"), "need `data.allow_media_urls=true`"),
        (dict(allow_media_urls=True, media_url_hosts=("http://a.org",)), "got 'http://a.org'"),
        (dict(allow_media_urls=True, media_url_hosts=("a.org:80",)), "names such as .*, got 'a.org:80'"),
    ],
)
def test_options_without_effect_are_problems(options, problem):
    problems = list(DataConfig(**options).problems("data"))

    assert len(problems) == 1 and re.search(problem, problems[0])


def test_hosts_are_names_or_addresses():
    hosts = ("files.example.org", "lab-store_1", "10.0.0.7", "::1", "fd00::7")

    assert not list(DataConfig(allow_media_urls=True, media_url_hosts=hosts).problems("data"))
