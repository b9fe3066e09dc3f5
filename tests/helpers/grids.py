# SPDX-License-Identifier: Apache-2.0
"""Media of models that read grids of patches, from the arguments of the models' own forward and back."""

from itertools import accumulate, pairwise

import torch

from verl.models.families.interface import MediaShape, Medium, MediumShape
from verl.models.families.registry import family_of

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def media_in(inputs):
    """The media of a processor's outputs, images before videos."""
    media = []
    for kind, name in PIXELS.items():
        if name not in inputs:
            continue
        grids = torch.as_tensor(inputs[f"{kind}_grid_thw"])
        bounds = pairwise(accumulate(grids.prod(-1).tolist(), initial=0))
        for number, (grid, (start, stop)) in enumerate(zip(grids.tolist(), bounds, strict=True)):
            facts = {"grid_thw": grid}
            if kind == "video" and "second_per_grid_ts" in inputs:
                facts["second_per_grid_ts"] = float(inputs["second_per_grid_ts"][number])
            media.append(Medium(kind, {name: inputs[name][start:stop]}, facts))
    return media


def inputs_of(loader, row):
    """The arguments of the model's own forward for a row's media."""
    return loader.family.own_inputs(loader.media(row))


def grids_in(shapes):
    return torch.tensor([shape.facts["grid_thw"] for shape in shapes]).reshape(-1, 3)


def shapes_of(image_grid_thw=None, video_grid_thw=None, second_per_grid_ts=None):
    """Shapes with these grids, whose tokens are not known."""
    images, videos = (
        [] if grids is None else torch.as_tensor(grids).tolist() for grids in (image_grid_thw, video_grid_thw)
    )
    seconds = [1.0] * len(videos) if second_per_grid_ts is None else list(map(float, second_per_grid_ts))
    return MediaShape(
        [MediumShape([], {"grid_thw": grid}) for grid in images],
        [
            MediumShape([], {"grid_thw": grid, "second_per_grid_ts": value})
            for grid, value in zip(videos, seconds, strict=True)
        ],
    )


def positions_of(config, ids, **grids):
    """Positions (4, L) of expanded ids (L,) with media of these grids."""
    return family_of(config).positions(config, ids, shapes_of(**grids))
