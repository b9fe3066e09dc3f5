# SPDX-License-Identifier: Apache-2.0
"""How much people like a picture, by the aesthetic predictor of LAION on embeddings of CLIP.

overall = weight * rating          weight 1 by default

rating     from about 1 to 10; of a video the mean of its frames

Source: https://github.com/christophschuhmann/improved-aesthetic-predictor. The environment variable
CLIP_MODEL_PATH names the folder of `openai/clip-vit-large-patch14`, AESTHETIC_MODEL_PATH the file
`sac+logos+ava1-l14-linearMSE.pth` or the same weights as safetensors. Each reward process loads both once.
"""

import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.rewards.graders.pictures import frames_of

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPModel

REWARD_NAME = "aesthetic"
REWARD_TYPE = "batch"
CLIP, RATING = "CLIP_MODEL_PATH", "AESTHETIC_MODEL_PATH"
WIDTHS = (1024, 128, 64, 16, 1)  # of the layers
PLACES = (0, 2, 4, 6, 7)  # of the layers in the published file, between dropout


class Critic(NamedTuple):
    """CLIP with what prepares its images, and the layers that rate embeddings."""

    clip: "CLIPModel"
    images: "CLIPImageProcessor"
    layers: nn.Sequential


@cache  # once for each process
def load_critic(clip: str, rating: str) -> Critic:
    # Imported here because a run imports this file before it loads anything, to look at it.
    from transformers import CLIPImageProcessor, CLIPModel  # noqa: PLC0415

    model = CLIPModel.from_pretrained(clip, dtype=torch.float32).eval()
    widths = [model.projection_dim, *WIDTHS]
    layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
    published = read_weights(Path(rating))
    names = {f"{layer}.{kind}": f"layers.{place}.{kind}" for layer, place in enumerate(PLACES)
             for kind in ("weight", "bias")}  # fmt: skip
    layers.load_state_dict({name: published[theirs] for name, theirs in names.items()})
    return Critic(model, CLIPImageProcessor.from_pretrained(clip), layers)


def read_weights(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file  # noqa: PLC0415

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def path_of(variable: str, what: str, *parts: str) -> str:
    path = os.environ.get(variable, "")
    if not path or not Path(path, *parts).is_file():
        raise FileNotFoundError(f"the environment variable {variable} ({path or 'not set'}) must name {what}")
    return path


@torch.inference_mode()
def ratings(critic: Critic, images: list[Any]) -> Tensor:
    """Return a rating (B,) of each image."""
    seen = critic.clip.vision_model(**critic.images(images, return_tensors="pt")).pooler_output
    embeds = critic.clip.visual_projection(seen)
    return critic.layers(embeds / embeds.norm(dim=-1, keepdim=True))[:, 0]


def compute_score(
    reward_inputs: list[dict[str, Any]], weight: float = 1.0, num_frames: int = 8
) -> list[dict[str, float]]:
    clip = path_of(CLIP, "a folder with a CLIPModel and its image processor", "config.json")
    critic = load_critic(clip, path_of(RATING, "a file with the weights of the predictor"))
    frames = [frames_of(row, num_frames) for row in reward_inputs]
    found = ratings(critic, [each for its in frames for each in its])
    means = [float(its.mean()) for its in found.split([len(its) for its in frames])]
    return [{"overall": weight * mean, "rating": mean} for mean in means]
