# SPDX-License-Identifier: Apache-2.0
"""Options of the data: where prompts come from, and how a row becomes one.

Names, defaults and meanings are EasyR1's and Long-RL's; `example=` is the value in `examples/config.yaml`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.paths import data_sources, existing_file, existing_folder, writable_folder
from verl.config.rollout import DIFFUSION, VILA
from verl.config.schema import option

HOST = re.compile(r"[\w.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")  # a name or an address, no port


@dataclass(frozen=True)
class RowsConfig:
    """Rows of data: where they come from, how their media are read, and in which order they come."""

    train_files: str | list[str] = option(
        "",
        help="Training rows: `PATH[@split]` or a list of them; a path is a file, a folder or a hub name.",
        resolve=data_sources,
        example="hiyouga/math12k@train",
    )
    val_files: str | list[str] = option(
        "",
        help="Validation rows, written like `train_files`.",
        resolve=data_sources,
        example="hiyouga/math12k@test",
    )
    prompt_key: str = option("prompt", help="Column of the prompt: text or chat messages.", example="problem")
    image_key: str = option("images", help="Column of the images.")
    video_key: str = option("videos", help="Column of the videos.")
    image_dir: str | None = option(
        None, help="Folder that image and video paths in the rows start from.", resolve=existing_folder
    )
    video_dir: str | None = option(
        None,
        help="Folder that video paths in the rows start from; null is `image_dir`.",
        resolve=existing_folder,
    )
    cache_dir: str | None = option(
        None,
        help="Folder where decoded video frames are kept from run to run; null keeps none.",
        resolve=writable_folder,
    )
    video_fps: float = option(2.0, help="Frames taken from a second of video.", minimum=0.01)
    row_timeout_s: float | None = option(
        300.0,
        help="Seconds that reading the media of a row may take before it is a bad row; null waits.",
        minimum=1.0,
    )
    allow_media_urls: bool = option(
        False, help="Fetch images and videos that rows name by URL; false makes such a row an error."
    )
    media_url_hosts: tuple[str, ...] = option(
        (),
        help="The only hosts that media are fetched from, private ones too; none is every public host.",
    )
    media_url_timeout_s: float = option(
        60.0, help="Seconds that fetching a file may take, redirects and repetitions included.", minimum=0.1
    )
    media_url_max_mb: int = option(1024, help="Mebibytes of a fetched file at most.", minimum=1)
    media_url_dir: str | None = option(
        None,
        help="Folder where fetched files are kept; null is one in the temporary folder of each node.",
        resolve=writable_folder,
    )
    format_prompt: str | None = option(
        None,
        help="Jinja file that renders a row; sees `content` (the prompt) and every column.",
        resolve=existing_file,
        example="./examples/format_prompt/math.jinja",
    )
    override_chat_template: str | None = option(
        None, help="Jinja file used instead of the tokenizer's chat template.", resolve=existing_file
    )
    shuffle: bool = option(True, help="Draw the training rows in random order.")
    seed: int = option(1, help="Seed of the order of the rows.", minimum=0)
    min_pixels: int = option(262144, help="Smaller images are scaled up to this many pixels.", minimum=1)
    max_pixels: int = option(4194304, help="Larger images are scaled down to this many pixels.", minimum=1)
    filter_overlong_prompts_workers: int = option(16, help="Processes that measure the rows.", minimum=1)
    num_workers: int = option(8, help="Processes that load rows; 0 loads in the main process.", minimum=0)
    on_bad_row: str = option(
        "error",
        help="What a row that cannot be used does: stop, or be left out and listed.",
        choices=("error", "skip"),
    )

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong between the options of this section."""
        if self.min_pixels > self.max_pixels:
            low, high = self.min_pixels, self.max_pixels
            yield f"`{path}.min_pixels` ({low}) must be at most `{path}.max_pixels` ({high})"
        if not self.allow_media_urls and (self.media_url_hosts or self.media_url_dir):
            yield (
                f"`{path}.media_url_hosts` and `{path}.media_url_dir` have no effect without"
                f" `{path}.allow_media_urls=true`"
            )
        for host in self.media_url_hosts:
            if not HOST.fullmatch(host):
                yield f"`{path}.media_url_hosts` must be names such as files.example.org, got {host!r}"


@dataclass(frozen=True)
class DataConfig(RowsConfig):
    """Prompts: where they come from and how a row becomes one."""

    answer_key: str = option("answer", help="Column of what the reward function compares with.")
    max_prompt_length: int = option(512, help="Tokens of a prompt at most.", minimum=1, example=2048)
    max_response_length: int = option(512, help="Tokens of a response at most.", minimum=1, example=2048)
    rollout_batch_size: int = option(512, help="Prompts in a training step.", minimum=1)
    mini_rollout_batch_size: int | None = option(
        None, help="Prompts in one call of the rollout engine; null is the whole rollout batch.", minimum=1
    )
    val_batch_size: int = option(
        -1, help="Prompts validated at once; -1 is all.", minimum=1, also=(-1,), example=1024
    )
    filter_overlong_prompts: bool = option(
        True, help="Leave out rows longer than `max_prompt_length`; false makes such a row an error."
    )
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    diffusion: bool = option(False, help="The model makes images or videos.", unavailable=DIFFUSION)
    is_omni: bool = option(False, help="The model hears audio.", unavailable="audio")
    audio_max_length: int = option(10000, help="Audio samples at most.", unavailable="audio")
