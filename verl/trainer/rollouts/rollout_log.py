# SPDX-License-Identifier: Apache-2.0
"""Keeps some responses of each step to look at: from the finished batch to rows of the rollout store."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from verl.config.ppo import PPOConfig
from verl.data.media.loader import MediaData, MediaLoader
from verl.data.media.references import Reference, shown_name
from verl.protocol import DataProto, objects
from verl.trainer.rollouts.scores import Values
from verl.viewer.rollout_store import RolloutStore

FRAMES = 8  # of a video, at most
TOKEN_VALUES = ["rollout_log_probs", "old_log_probs", "advantages"]
KEPT_TENSORS = [
    "prompt_mask", "attention_mask", "response_mask", "responses", "token_level_scores", *TOKEN_VALUES,
]  # fmt: skip


class Kept(NamedTuple):
    """Where a response stands in the batch, and which of its group it is."""

    row: int
    sample: int


class RolloutLog:
    """Writes the responses to the first `trainer.rollouts_to_keep` prompts of every step.

    Prompts come in random order, so that the first are a fair sample; their groups are kept whole.

    Args:
        config: Of the run; the rollouts go beside its checkpoints.
        tokenizer: Of the model.
        media: Reads the prompts' media, which the run's cache still has; None for a model of text.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, media: MediaLoader | None) -> None:
        self.num_groups = config.trainer.rollouts_to_keep
        self.skip_special_tokens = config.worker.reward.skip_special_tokens
        self.tokenizer = tokenizer
        self.media = media
        self.store = RolloutStore(Path(config.trainer.checkpoint_folder))

    def keep(self, batch: DataProto, step: int) -> None:
        """Write what is kept of a finished batch.

        Args:
            batch: After the advantages; `reward_values` holds what the reward function returned.
            step: Of the run.

        Raises:
            OSError: The run's folder cannot be written; a disk without room is a warning.
        """
        kept = first_groups(batch, self.num_groups)
        if not kept:
            return
        sequences = batch[[one.row for one in kept]]
        arrays = {name: sequences.batch[name].cpu().numpy() for name in KEPT_TENSORS}
        pieces = self._pieces(arrays["responses"])
        media: dict[str, list[dict[str, Any]]] = {}  # by group: its responses share them
        rows = []
        for number, one in enumerate(kept):
            item = {name: column[number] for name, column in sequences.non_tensor_batch.items()}
            if item["uid"] not in media:
                media[item["uid"]] = list(self._media(item.get("multi_modal_data")))
            shared = media[item["uid"]]
            row = self._row(item, {name: array[number] for name, array in arrays.items()}, pieces)
            rows.append(row | {"step": step, "sample": one.sample, "media": shared, "num_media": len(shared)})
        self.store.write(step, rows)

    def _row(
        self, item: Mapping[str, Any], arrays: Mapping[str, np.ndarray], pieces: dict[int, str]
    ) -> dict[str, Any]:
        length = arrays["responses"].shape[-1]
        is_response = arrays["attention_mask"][-length:].astype(bool)  # (R,)
        is_trained = arrays["response_mask"].astype(bool)  # (R,) without what was masked or rejected
        token_ids = arrays["responses"][is_response]
        is_scored = not math.isnan(item["reward_values"]["overall"])  # else its call failed
        source = item.get("data_source")
        return {
            "group": str(item["uid"]),
            "data_source": None if source is None else str(source),
            "prompt": item["prompt_text"],
            "messages": json.dumps(item["prompt_messages"]),
            "response": self.tokenizer.decode(
                token_ids.tolist(), skip_special_tokens=self.skip_special_tokens
            ),
            "ground_truth": str(item["ground_truth"]),
            "finish_reason": item["finish_reason"],
            "score": float(arrays["token_level_scores"].sum()) if is_scored else None,
            "advantage": float(arrays["advantages"][is_trained].mean()) if is_trained.any() else None,
            "reward_values": item["reward_values"],
            "prompt_length": int(arrays["prompt_mask"].sum()),
            "response_length": len(token_ids),
            "token_ids": token_ids,
            "tokens": [pieces[token] for token in token_ids.tolist()],
            **{name: arrays[name][is_response] for name in TOKEN_VALUES},
        }

    def _pieces(self, token_ids: np.ndarray) -> dict[int, str]:
        """The text of each token that occurs, decoded alone: a part of a character is a replacement sign."""
        tokens = np.unique(token_ids).tolist()
        return {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in tokens}

    def _media(self, media: MediaData) -> Iterator[dict[str, Any]]:
        for kind, plural in (("image", "images"), ("video", "videos")):
            for ref in (media or {}).get(plural) or []:
                yield {"kind": kind, "source": shown_name(ref), **self._copies(plural, ref)}

    def _copies(self, plural: str, ref: Reference) -> dict[str, Any]:
        assert self.media is not None, "a prompt has media only with a model that reads them"
        try:
            decoded = self.media.decode({plural: [ref]})
        except ValueError as error:  # its file went away since the workers read it
            return {"files": [], "problem": str(error)}
        pictures = [*decoded.images, *(frame for frames, _ in decoded.videos for frame in _spread(frames))]
        files = [file for file in map(self.store.add_image, pictures) if file is not None]
        return {"files": files, "problem": None if len(files) == len(pictures) else "the disk had no room"}


def with_reward_values(batch: DataProto, values: Values) -> DataProto:
    """The batch with what the reward function returned for each row: {"overall": 1.0, "format": 0.0}."""
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return batch.merge(DataProto.from_dict(non_tensors={"reward_values": objects(rows)}))


def first_groups(batch: DataProto, num_groups: int) -> list[Kept]:
    """The responses of the first groups, in the order in which they were collected.

    Args:
        batch: Reads `row_ids` and `uid`; a response that was drawn several times counts as often.
        num_groups: 0 is none.
    """
    in_order = batch.batch["row_ids"].argsort(stable=True).tolist()
    groups: dict[Any, list[int]] = {}
    for row in in_order:
        groups.setdefault(batch.non_tensor_batch["uid"][row], []).append(row)
    chosen: Iterable[list[int]] = islice(groups.values(), num_groups)
    return [Kept(row, sample) for rows in chosen for sample, row in enumerate(rows)]


def _spread(frames: np.ndarray) -> Iterator[Image.Image]:
    """Frames (T, H, W, 3) as images, from the first to the last; not all of a long video."""
    numbers = np.linspace(0, len(frames) - 1, min(FRAMES, len(frames))).round().astype(int)
    return (Image.fromarray(frames[number]) for number in numbers)
