# SPDX-License-Identifier: Apache-2.0
"""Section `data`. Names, defaults and meanings are EasyR1's and Long-RL's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl.config.files.paths import data_sources, existing_file, existing_folder, writable_folder
from verl.config.schema import option

SET_BY_US = ("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")
FILES = ("train_files", "val_files")
HOST = re.compile(r"[\w.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")  # a name or an address, no port


@dataclass(frozen=True)
class SourceConfig:
    """A source of a mixture of data."""

    train_files: str | list[str] = option(
        "", "Training data, like `data.train_files`; empty only validates.", resolve=data_sources
    )
    val_files: str | list[str] = option("", "Validation data, like `data.val_files`.", resolve=data_sources)
    weight: float = option(
        1.0, "Share of the training rows, relative to the weights of the other sources.", minimum=0.0
    )

    def problems(self, path: str) -> Iterator[str]:
        if not self.train_files and not self.val_files:
            yield f"`{path}.train_files` or `{path}.val_files` must be set"
        if self.train_files and not self.weight:
            yield f"`{path}.weight` must be above 0; to only validate, set `{path}.val_files` alone"


@dataclass(frozen=True)
class RowsConfig:
    """Source, order and media of the rows."""

    train_files: str | list[str] = option(
        "",
        "Training data: `PATH[@split]` or a list of them; a path is a file, a folder or a hub name"
        " (`owner/name`, `owner/name/subset`, `owner/name:subset`).",
        resolve=data_sources,
        example="hiyouga/math12k@train",
    )
    val_files: str | list[str] = option(
        "", "Validation data, like `train_files`.", resolve=data_sources, example="hiyouga/math12k@test"
    )
    sources: dict[str, SourceConfig] = option(
        dict,
        "Sources of a mixture, by name, instead of `train_files` and `val_files`: each has its share of the"
        " rows of every step.",
    )
    source_key: str = option("source", "Column that is added to the rows of `sources`: the source's name.")
    prompt_key: str = option("prompt", "Column of the prompt: text or chat messages.", example="problem")
    image_key: str = option("images", "Column of the images.")
    video_key: str = option("videos", "Column of the videos.")
    audio_key: str = option("audios", "Column of the audio, for models that hear.")
    image_dir: str | None = option(None, "Base folder of image and video paths.", resolve=existing_folder)
    video_dir: str | None = option(
        None, "Base folder of video paths; null is `image_dir`.", resolve=existing_folder
    )
    audio_dir: str | None = option(
        None, "Base folder of audio paths; null is `image_dir`.", resolve=existing_folder
    )
    use_audio_in_video: bool = option(
        False, "Hear the sound of videos along with their frames, for models that hear."
    )
    cache_dir: str | None = option(
        None, "Folder that caches decoded video frames; null disables the cache.", resolve=writable_folder
    )
    video_fps: float = option(2.0, "Frames sampled per second of video.", minimum=0.01)
    row_timeout_s: float | None = option(
        300.0, "Seconds to read a row's media, after which the row is bad; null means no limit.", minimum=1.0
    )
    allow_media_urls: bool = option(False, "Download media given by URL; otherwise they are an error.")
    media_url_hosts: tuple[str, ...] = option(
        (), "Allowed hosts of media downloads, including private ones; empty allows all public hosts."
    )
    media_url_timeout_s: float = option(60.0, "Seconds per download with redirects and retries.", minimum=0.1)
    media_url_max_mb: int = option(1024, "Maximum size of a download in MiB.", minimum=1)
    media_url_dir: str | None = option(
        None, "Download folder; null is one in each node's temporary directory.", resolve=writable_folder
    )
    format_prompt: str | None = option(
        None,
        "Jinja file that renders a row; it has access to `content` (the prompt) and every column.",
        resolve=existing_file,
        example="./examples/format_prompt/math.jinja",
    )
    override_chat_template: str | None = option(
        None, "Jinja file that replaces the tokenizer's chat template.", resolve=existing_file
    )
    apply_chat_template_kwargs: dict[str, Any] = option(
        dict, "Variables of the chat template, such as `enable_thinking=false` for Qwen3."
    )
    shuffle: bool = option(True, "Shuffle the training rows.")
    seed: int = option(1, "Random seed of the row order.", minimum=0)
    streaming: bool = option(
        False, "Check and measure training rows when they are read, instead of all of them at the start."
    )
    shuffle_buffer: int = option(
        10_000, "Rows among which the next one is drawn with `streaming` and `shuffle`.", minimum=1
    )
    min_pixels: int | None = option(
        262144, "Minimum pixels of an image; smaller images are upscaled; null means no minimum.", minimum=1
    )
    max_pixels: int | None = option(
        4194304, "Maximum pixels of an image; larger images are downscaled; null means no maximum.", minimum=1
    )
    filter_overlong_prompts_workers: int = option(16, "Processes that measure row lengths.", minimum=1)
    num_workers: int = option(
        8, "Data loading processes, at most one per core; 0 loads in the main process.", minimum=0
    )
    on_bad_row: str = option(
        "error", "On unusable rows: stop with an error, or skip and list them.", choices=("error", "skip")
    )
    dataset: str | None = option(
        None,
        "Class of a file, `FILE.py:NAME`, that opens and renders the rows; null is the built-in one.",
        extension="dataset",
    )
    sampler: str | None = option(
        None,
        "Class of a file, `FILE.py:NAME`, that draws the training rows by their scores so far; null reads"
        " them in epochs.",
        extension="sampler",
    )
    sampler_kwargs: dict[str, Any] = option(dict, "Keyword arguments of the sampler.")

    def __post_init__(self) -> None:
        for name in FILES:
            if not getattr(self, name) and (files := self._files_of_sources(name)):
                object.__setattr__(self, name, files)

    def files_by_source(self, name: str) -> dict[str, str | list[str]]:
        """Return `train_files` or `val_files` of the sources that have any."""
        found = {source: getattr(config, name) for source, config in self.sources.items()}
        return {source: files for source, files in found.items() if files}

    def _files_of_sources(self, name: str) -> list[str]:
        return [file for files in self.files_by_source(name).values() for file in _listed(files)]

    def problems(self, path: str) -> Iterator[str]:
        low, high = self.min_pixels, self.max_pixels
        if low is not None and high is not None and low > high:
            yield f"`{path}.min_pixels` ({low}) must be at most `{path}.max_pixels` ({high})"
        if not self.allow_media_urls and (self.media_url_hosts or self.media_url_dir):
            yield f"`{path}.media_url_hosts` and `{path}.media_url_dir` need `{path}.allow_media_urls=true`"
        if self.sampler_kwargs and self.sampler is None:
            yield f"`{path}.sampler_kwargs` needs `{path}.sampler`"
        if not self.source_key:
            yield f"`{path}.source_key` must name a column, got ''"
        for name in self.apply_chat_template_kwargs:
            if name in SET_BY_US:
                key = f"{path}.apply_chat_template_kwargs.{name}"
                yield f"`{key}` must not be set: see `{path}.override_chat_template` for another template"
        for host in self.media_url_hosts:
            if not HOST.fullmatch(host):
                yield f"`{path}.media_url_hosts` must be names such as files.example.org, got {host!r}"
        for name in FILES:
            if self._files_of_sources(name) not in ([], _listed(getattr(self, name))):
                yield f"`{path}.{name}` must be empty with `{path}.sources`: clear it, `{path}.{name}=`"


@dataclass(frozen=True)
class DataConfig(RowsConfig):
    """Prompts and their batches."""

    answer_key: str = option("answer", "Column of the ground truth, or `COLUMN.KEY` inside of one.")
    category_keys: tuple[str, ...] = option(
        (), "Columns of `val_files` whose values are categories: each has validation metrics of its own."
    )
    max_prompt_length: int = option(512, "Maximum prompt length in tokens.", minimum=1, example=2048)
    max_response_length: int = option(512, "Maximum response length in tokens.", minimum=1, example=2048)
    rollout_batch_size: int = option(512, "Prompts per training step.", minimum=1)
    mini_rollout_batch_size: int | None = option(
        None, "Prompts per call of the rollout engine; null is `rollout_batch_size`.", minimum=1
    )
    val_batch_size: int = option(
        -1, "Prompts per validation batch; -1 is all.", minimum=1, also=(-1,), example=1024
    )
    filter_overlong_prompts: bool = option(True, "Drop overlong prompts; otherwise they are an error.")
    vila_model: bool = option(False, "The model belongs to the VILA family.")
    diffusion: bool = option(False, "The model generates images or videos.")
    is_omni: bool = option(False, "The model takes audio.")
    audio_max_length: int = option(10000, "Frames that audio is padded to.")

    def without_training(self) -> "DataConfig":
        """Return the section of a run that only validates."""
        sources = {
            name: replace(source, train_files="") for name, source in self.sources.items() if source.val_files
        }
        return replace(self, train_files="", sources=sources)

    @property
    def categories(self) -> tuple[str, ...]:
        """Columns whose values have validation metrics of their own."""
        return (*self.category_keys, *((self.source_key,) if self.files_by_source("val_files") else ()))


def _listed(files: str | list[str]) -> list[str]:
    return [files] if isinstance(files, str) else files
