# SPDX-License-Identifier: Apache-2.0
"""Prompts of the quickstart for a picture or video of one color, and a grid of them. Deterministic."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from shapes import COLORS, save_rows

from verl.utils.quiet import no_weight_bars

WORDINGS = {
    "train": (
        "a {} picture", "the picture is {}", "paint it {}", "all {}", "the wall is {}", "paint a {} picture",
        "{} light", "the {} wall", "it is {}", "in {} and dark", "a picture all in {}", "a {} light",
    ),
    "val": (
        "paint the wall {}", "a {} wall", "it is all {}", "paint in {}", "the {} picture", "a picture in {}",
        "all the wall is {}", "it is a {} wall",
    ),
}  # fmt: skip
PER_PROMPT = 4  # pictures of the grid, before and after training; of a video, all frames


def write_prompts(folder: Path, name: str, seed: int) -> Path:
    """Write every wording of `train` or `val` with every color to `<name>.jsonl`; returns the file.

    The colors are equally frequent: always painting the same one is right 1 time in 4.
    """
    rows = [{"prompt": text.format(color), "answer": color} for text in WORDINGS[name] for color in COLORS]
    random.Random(seed).shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")


def write_pictures(folder: Path, exported: Path, paint: Callable[..., np.ndarray]) -> Path:
    """Paint a held-out prompt of each color before and after training; returns the PNG.

    `paint` is one of the functions below.
    """
    rows = [json.loads(line) for line in (folder / "val.jsonl").read_text().splitlines()]
    prompts = [next(row["prompt"] for row in rows if row["answer"] == color) for color in COLORS]
    config = json.loads((folder / "checkpoints" / "experiment_config.json").read_text())
    pictures = [
        paint(load_pipeline(path), config["worker"]["rollout"], **arguments(prompts, config))
        for path in (folder / "model", exported)
    ]
    path = folder / "pictures.png"
    draw_grid(prompts, dict(zip(("before training", "after training"), pictures, strict=True)), path)
    return path


def load_pipeline(model: Path) -> Any:
    """Load a model as its users do."""
    with no_weight_bars():
        pipeline: Any = DiffusionPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def arguments(prompts: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of every pipeline that samples as a run validates."""
    rollout = config["worker"]["rollout"]
    return {
        "prompt": prompts, "output_type": "np", "num_inference_steps": rollout["num_steps"],
        "guidance_scale": rollout["guidance_scale"], "generator": torch.Generator().manual_seed(0),
        "max_sequence_length": config["data"]["max_prompt_length"],
    }  # fmt: skip


def paint_pictures(pipeline: Any, rollout: dict[str, Any], **arguments: Any) -> np.ndarray:
    """Return pictures (prompts, PER_PROMPT, H, W, 3) from 0 to 1."""
    side = rollout["resolution"]
    pictures = pipeline(num_images_per_prompt=PER_PROMPT, height=side, width=side, **arguments).images
    return pictures.reshape(-1, PER_PROMPT, *pictures.shape[1:])


def paint_videos(pipeline: Any, rollout: dict[str, Any], **arguments: Any) -> np.ndarray:
    """Return the frames of a video for each prompt, (prompts, F, H, W, 3) from 0 to 1."""
    size = {name: rollout[name] for name in ("num_frames", "height", "width")}
    return pipeline(**size, **arguments).frames


def draw_grid(prompts: list[str], pictures: dict[str, np.ndarray], path: Path) -> None:
    """Draw a row for each prompt, and columns for each title, as a PNG."""
    matplotlib.use("Agg")
    columns = [len(each[0]) for each in pictures.values()]
    figure, axes = plt.subplots(
        len(prompts), sum(columns), figsize=(9, 4.6), layout="constrained", squeeze=False
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for row, prompt in enumerate(prompts):
        axes[row, 0].set_ylabel(prompt, rotation="horizontal", ha="right", va="center")
        shown = np.concatenate([each[row] for each in pictures.values()])
        for axis, picture in zip(axes[row], shown, strict=True):
            axis.imshow(picture)
    for number, title in enumerate(pictures):
        axes[0, sum(columns[:number])].set_title(title, loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)
