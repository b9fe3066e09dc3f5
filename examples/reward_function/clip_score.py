# SPDX-License-Identifier: Apache-2.0
"""How well pictures fit their prompts, by CLIP or a CLIP trained on preferences such as PickScore.

overall = weight * cosine          weight 1 by default

cosine   of the model's embeddings of picture and prompt, in [-1, 1]. The mean over `num_frames` frames of a
         video, 8 by default, which are evenly spread

CLIPScore (https://arxiv.org/abs/2104.08718) has weight 2.5, and sets negative values to 0; PickScore
(https://arxiv.org/abs/2305.01569) has the model's scale, about 100. The environment variable CLIP_MODEL_PATH
names the folder of a `CLIPModel` with its processor, such as a download of `openai/clip-vit-large-patch14` or
of `yuvalkirstain/PickScore_v1`, which needs the processor of `laion/CLIP-ViT-H-14-laion2B-s32B-b79K` in it.
Each reward process loads it once; prompts are cut after the 77 tokens that CLIP reads.
"""

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from verl.rewards.graders.pictures import pictures_of

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

REWARD_NAME = "clip_score"
REWARD_TYPE = "batch"
FOLDER = "CLIP_MODEL_PATH"


class Clip(NamedTuple):
    """A model with what prepares its inputs."""

    model: "CLIPModel"
    images: "CLIPImageProcessor"
    tokenizer: "CLIPTokenizer"
    longest: int  # tokens of a prompt


@cache  # once for each process
def load_clip(folder: str) -> Clip:
    # Imported here because a run imports this file before it loads anything, to look at it.
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer  # noqa: PLC0415

    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    longest = model.text_model.embeddings.position_embedding.num_embeddings
    return Clip(model, CLIPImageProcessor.from_pretrained(folder), tokenizer, longest)


def clip_folder() -> str:
    folder = os.environ.get(FOLDER, "")
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(
            f"the environment variable {FOLDER} ({folder or 'not set'}) must name a folder with a CLIPModel,"
            " its tokenizer and its image processor: download one, for example"
            " `hf download openai/clip-vit-large-patch14 --local-dir clip`"
        )
    return folder


@torch.inference_mode()
def cosines(clip: Clip, pictures: list[Tensor], prompts: list[str]) -> Tensor:
    """Return the cosine (B,) of each picture (3, H, W) from 0 to 1 and its prompt."""
    pixels = clip.images(pictures, do_rescale=False, return_tensors="pt")
    tokens = clip.tokenizer(
        prompts, padding=True, truncation=True, max_length=clip.longest, return_tensors="pt"
    )
    found = clip.model(**pixels, **tokens)
    return (found.image_embeds * found.text_embeds).sum(-1)  # both have length 1


def compute_score(
    reward_inputs: list[dict[str, Any]], weight: float = 1.0, num_frames: int = 8
) -> list[dict[str, float]]:
    pictures = [pictures_of(one, num_frames) for one in reward_inputs]
    prompts = [str(one["prompt"]) for one, its in zip(reward_inputs, pictures, strict=True) for _ in its]
    found = cosines(load_clip(clip_folder()), [each for its in pictures for each in its], prompts)
    means = [float(its.mean()) for its in found.split([len(its) for its in pictures])]
    return [{"overall": weight * cosine, "cosine": cosine} for cosine in means]
