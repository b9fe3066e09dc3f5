# SPDX-License-Identifier: Apache-2.0
import pytest
from verl_longvideo.command import main

from tests.cli.longvideo.narrator import Narrator
from tests.helpers.films import save_film


@pytest.fixture(scope="package")
def videos(tmp_path_factory):
    """Three videos of 5 seconds, one of them in a subfolder: clips of 2, 2 and 1 seconds."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "more").mkdir()
    for name in ("a.mp4", "b.mp4", "more/c.mkv"):
        save_film(folder / name, "mpeg4", 60, 12, fps=12)
    return folder


@pytest.fixture(scope="package")
def command(videos):
    """The arguments of a command: its folder, a server or its address, and more switches."""

    def arguments(out, server, *switches, videos=videos):
        url = server if isinstance(server, str) else server.url
        return [
            "--videos", str(videos), "--out", str(out), "--clip-seconds", "2", "--clip-fps", "4",
            "--frames", "3", "--caption-url", url, "--caption-model", "vlm", "--reason-url", url,
            "--reason-model", "thinker", "--val-videos", "1", "--sft-share", "0.5", "--max-retries", "0",
            "--timeout", "30", *switches,
        ]  # fmt: skip

    return arguments


@pytest.fixture(scope="package")
def whole(command, tmp_path_factory):
    """The folder of an uninterrupted command, and the server that it asked."""
    out = tmp_path_factory.mktemp("whole")
    with Narrator() as server:
        assert main(command(out, server)) == 0
    return out, server
