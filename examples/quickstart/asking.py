# SPDX-License-Identifier: Apache-2.0
"""Questions to an exported model of the quickstart, asked with transformers alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from events import FPS, NUM_FRAMES
from moving import NUM_SAMPLED
from PIL import Image
from shapes import IMAGE_SIZE
from tones import RATE

from verl.data.media.audio import AudioOptions, read_audio
from verl.data.media.video import VideoOptions, read_video
from verl.models.families.interface import KINDS as MEDIA
from verl.models.families.interface import MediaFamily, MediaShape, MediumShape
from verl.models.families.registry import family_of
from verl.utils.quiet import no_weight_bars

FRAME_LIMITS = dict(shortest_edge=IMAGE_SIZE**2, longest_edge=IMAGE_SIZE**2)  # of pixels


def read_image(path: Path) -> dict[str, Any]:
    """Return an image as arguments of a processor."""
    return {"images": [Image.open(path)]}


def read_frames(path: Path, num_frames: int = NUM_SAMPLED) -> dict[str, Any]:
    """Return the frames of a video that the trainer samples, as arguments of a processor."""
    frames, meta = read_video(
        str(path), VideoOptions(IMAGE_SIZE**2, IMAGE_SIZE**2, 28, num_frames=num_frames)
    )
    facts = {key: value for key, value in meta.items() if key != "do_sample_frames"}
    return {"videos": [frames], "video_metadata": [facts], "do_sample_frames": False}


def read_sound(path: Path) -> dict[str, Any]:
    """Return the samples of a sound as arguments of a processor."""
    return {"audio": [read_audio(str(path), AudioOptions(RATE, longest_s=30))], "sampling_rate": RATE}


def read_film(path: Path) -> dict[str, Any]:
    """Return the frames and the sound of a video as arguments of a processor."""
    options = {"use_audio_in_video": True, "fps": FPS, "size": FRAME_LIMITS}
    return read_sound(path) | read_frames(path, NUM_FRAMES) | {"videos_kwargs": options}


@torch.no_grad()
def ask(
    model_path: Path, folder: Path, model_class: str, media_key: str, read: Callable[[Path], dict[str, Any]]
) -> tuple[str, str, str]:
    """Ask the exported model the first held-out question; returns question, response and right answer."""
    row = json.loads((folder / "val.jsonl").read_text().splitlines()[0])
    reader = transformers.AutoProcessor.from_pretrained(model_path)  # a tokenizer, for a text model
    with no_weight_bars():
        model = getattr(transformers, model_class).from_pretrained(model_path, dtype=torch.float32)
    question = re.sub("<(image|video|audio)>", "", row["problem"])
    content, media = [{"type": "text", "text": question}], {}
    if media_key in row:
        content.insert(0, {"type": media_key.removesuffix("s")})
        media = read(folder / media_key / row[media_key][0])
    messages = [{"role": "user", "content": content}]
    text = reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = reader(text=[text], return_tensors="pt", **media)
    if media.get("videos_kwargs"):
        inputs["use_audio_in_video"] = True  # the model computes its positions itself
    else:
        inputs |= find_positions(model.config, inputs)
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    response = reader.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return question, response, row["answer"]


def find_positions(config: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the position ids that the model was trained with; transformers' differ after a video.

    Empty for models with positions 0, 1, 2, ...
    """
    family = family_of(config)
    if not isinstance(family, MediaFamily):
        return {}
    grids = {kind: torch.as_tensor(inputs.get(f"{kind}_grid_thw", ())).tolist() for kind in MEDIA}
    seconds = inputs.get("second_per_grid_ts", [1.0] * len(grids["video"]))
    facts: dict[str, list[dict[str, Any]]] = {
        "audio": [],  # it has positions like text
        "image": [{"grid_thw": grid} for grid in grids["image"]],
        "video": [
            {"grid_thw": grid, "second_per_grid_ts": float(value)}
            for grid, value in zip(grids["video"], seconds, strict=True)
        ],
    }
    shape = MediaShape(*([MediumShape([], each) for each in facts[kind]] for kind in MEDIA))
    positions = family.positions(config, inputs["input_ids"][0], shape)  # (4, L)
    return {} if positions is None else {"position_ids": positions.unsqueeze(1)}
