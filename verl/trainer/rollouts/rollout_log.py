# SPDX-License-Identifier: Apache-2.0
"""Records some responses of each step for people to read, as rows of the rollout store."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from verl.data.media.references import MediaData, Reference, media_key, payload, shown_name
from verl.models.families.interface import KINDS
from verl.protocol import DataProto
from verl.rewards.turns import name_of
from verl.viewer.pictures import draw_waveform
from verl.viewer.rollout_store import TRAIN, RolloutStore

if TYPE_CHECKING:
    from verl.data.media.loader import MediaLoader

MAX_FRAMES = 8  # shown of a video
TOKEN_VALUES = ["rollout_log_probs", "old_log_probs", "advantages"]  # a validation has only the first
KEPT_TENSORS = ["prompt_mask", "response_mask", "loss_mask", "responses", "token_level_scores"]


@dataclass(eq=False)
class RolloutLog:
    """Writes the responses to the first `trainer.rollouts_to_keep` prompts of every step, in whole groups.

    Likewise of every validation, whose first prompts are always the same.
    """

    run_folder: Path
    num_groups: int
    tokenizer: Any
    media: "MediaLoader | None"  # reads from the run's cache; None for a text model
    _: KW_ONLY
    skip_special_tokens: bool
    tools: Sequence[Mapping[str, Any]] = ()  # schemas
    keep_whole_images: bool = False

    def __post_init__(self) -> None:
        self.store = RolloutStore(self.run_folder)

    def keep(self, batch: DataProto, step: int, kind: str = TRAIN) -> None:
        """Write the first groups of a finished batch; a full disk is only a warning."""
        kept = first_groups(batch, self.num_groups)
        if not kept:
            return
        sequences = batch[[row for row, _ in kept]]
        present = set(sequences.batch.keys())
        names = [name for name in KEPT_TENSORS + TOKEN_VALUES if name in present]
        arrays = {name: sequences.batch[name].cpu().numpy() for name in names}
        texts = self._token_texts(arrays["responses"])
        media: dict[Any, list[dict[str, Any]]] = {}  # responses to a prompt share them
        rows = []
        for number, (_, sample) in enumerate(kept):
            item = {name: column[number] for name, column in sequences.non_tensor_batch.items()}
            prompt = item["uid"], media_key(item.get("multi_modal_data"))
            if prompt not in media:
                media[prompt] = list(self._media(item.get("multi_modal_data")))
            shared = media[prompt]
            row = self._row(item, {name: array[number] for name, array in arrays.items()}, texts)
            rows.append(row | {"step": step, "sample": sample, "media": shared, "num_media": len(shared)})
        self.store.write(step, rows, kind)

    def _row(
        self, item: Mapping[str, Any], arrays: Mapping[str, np.ndarray], texts: dict[int, str]
    ) -> dict[str, Any]:
        is_response = arrays["response_mask"].astype(bool)  # (R,)
        is_trained = arrays["loss_mask"].astype(bool)  # (R,) without masked and rejected tokens
        token_ids = arrays["responses"][is_response]
        is_scored = not math.isnan(item["reward_values"]["overall"])  # nan if its call failed
        source = item.get("data_source")
        values = {name: arrays[name][is_response] for name in TOKEN_VALUES if name in arrays}
        has_advantage = "advantages" in arrays and is_trained.any()
        return {
            "group": str(item["uid"]),
            "data_source": None if source is None else str(source),
            "prompt": item["prompt_text"],
            "messages": json.dumps(item["prompt_messages"]),
            "ground_truth": str(item["ground_truth"]),
            "finish_reason": item["finish_reason"],
            "score": float(arrays["token_level_scores"].sum()) if is_scored else None,
            "advantage": float(arrays["advantages"][is_trained].mean()) if has_advantage else None,
            "reward_values": item["reward_values"],
            "prompt_length": int(arrays["prompt_mask"].sum()),
            "response_length": len(token_ids),
            "token_ids": token_ids,
            "tokens": [texts[token] for token in token_ids.tolist()],
            "is_trained": is_trained[is_response],
            "is_masked": not is_trained.any(),
            **values,
            **self._response(item, token_ids.tolist()),
            **self._conversation(item, token_ids.tolist()),
        }

    def _response(self, item: Mapping[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return {"response": self._decode(token_ids)}

    def _conversation(self, item: Mapping[str, Any], token_ids: list[int]) -> dict[str, Any]:
        """Return the columns of a conversation; none for a response of one turn without tools."""
        turns = item.get("turns")
        if not turns:
            return {}
        media = _Media(item.get("observation_media") or {}, self._media)
        numbered, contexts, shown = iter(enumerate(turns)), [], []
        for number, context in enumerate(item["contexts"]):
            tools = self.tools if context["tools"] is None else context["tools"]
            # Those of the first context are the prompt's.
            opening = media.next(context["num_images"], context["num_videos"]) if number else []
            contexts.append(
                {
                    **{name: context[name] for name in ("start", "num_turns", "num_opening")},
                    "messages": json.dumps(context["messages"]),
                    "tools": json.dumps(tools),
                    "media": opening,
                }
            )
            for place, turn in islice(numbered, context["num_turns"]):
                # of the reward function, if it rewards turns
                reward = item["reward_values"].get(name_of(place), turn["reward"])
                text = self._decode(token_ids[turn["start"] : turn["stop"]])
                shown.append({**_turn(turn, media), "reward": reward, "text": text})
        assert len(shown) == len(turns), "each turn belongs to a context"
        observations = [one for turn in turns for one in turn["observations"]]
        return {
            "num_turns": len(turns),
            "num_calls": sum(len(turn["calls"]) for turn in turns),
            "num_failures": sum(one["failed"] for one in observations),
            "stop_reason": item["stop_reason"],
            "contexts": contexts,
            "turns": shown,
        }

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)

    def _token_texts(self, token_ids: np.ndarray) -> dict[int, str]:
        # Each token is decoded alone, so a part of a character becomes a replacement character.
        tokens = np.unique(token_ids).tolist()
        return {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in tokens}

    def _media(self, media: MediaData) -> Iterator[dict[str, Any]]:
        for kind in KINDS:
            for ref in (media or {}).get(f"{kind}s") or []:
                yield {"kind": kind, "source": shown_name(ref), **self._copies(f"{kind}s", ref)}

    def _copies(self, plural: str, ref: Reference) -> dict[str, Any]:
        assert self.media is not None, "a prompt has media only with a model that reads them"
        try:
            decoded = self.media.decode({plural: [ref]})
        except ValueError as error:  # its file was removed after the workers read it
            return {"files": [], "problem": str(error)}
        pictures, times = decoded.images, None
        for frames, meta in decoded.videos:
            chosen = spread(len(frames))
            pictures = [Image.fromarray(frames[number]) for number in chosen]
            times = [float(meta["frames_indices"][number] / meta["fps"]) for number in chosen]
        pictures = [*pictures, *(draw_waveform(samples) for samples, _ in decoded.audios)]
        files = [file for file in map(self.store.add_image, pictures) if file is not None]
        if len(files) < len(pictures):
            return {"files": files, "problem": "the disk is full"}
        source = payload(ref)
        whole = None
        if self.keep_whole_images and plural == "images" and isinstance(source, bytes):
            whole = self.store.add_whole(source)
        return {"files": files, "problem": None, "times": times, "whole": whole}


def first_groups(batch: DataProto, num_groups: int) -> list[tuple[int, int]]:
    """Return the rows of the first groups in the order of collection, and the number of each in its group.

    Reads `row_ids` and `uid`. A response that was resampled several times is returned as often.
    """
    groups: dict[Any, list[int]] = {}
    for row in batch.batch["row_ids"].argsort(stable=True).tolist():
        groups.setdefault(batch.non_tensor_batch["uid"][row], []).append(row)
    # Prompts come in random order, so the first are a fair sample.
    chosen: Iterable[list[int]] = islice(groups.values(), num_groups)
    return [(row, sample) for rows in chosen for sample, row in enumerate(rows)]


def spread(num_frames: int) -> list[int]:
    """Return the numbers of evenly spaced frames, the first and the last included."""
    return np.linspace(0, num_frames - 1, min(MAX_FRAMES, num_frames)).round().astype(int).tolist()


class _Media:
    """The media of a response in the order in which the policy read them."""

    def __init__(
        self, media: Mapping[str, Any], keep: Callable[[MediaData], Iterable[dict[str, Any]]]
    ) -> None:
        self._left = {name: iter(media.get(name) or ()) for name in ("images", "videos")}
        self._keep = keep

    def next(self, num_images: int, num_videos: int) -> list[dict[str, Any]]:
        counts = {"images": num_images, "videos": num_videos}
        return list(self._keep({name: list(islice(self._left[name], counts[name])) for name in counts}))


def _turn(turn: Mapping[str, Any], media: _Media) -> dict[str, Any]:
    return {
        **{name: turn[name] for name in ("start", "stop", "seconds", "is_shown")},
        "calls": [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            for call in turn["calls"]
        ],
        "observations": [
            {
                **{name: one[name] for name in ("text", "failed", "seconds")},
                "num_media": one["images"] + one["videos"],
                # Media of others are not part of the row.
                "media": media.next(one["images"], one["videos"]) if turn["is_shown"] else [],
            }
            for one in turn["observations"]
        ],
    }
