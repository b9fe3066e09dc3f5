# SPDX-License-Identifier: Apache-2.0
"""Images and videos of observations: references, tokens, and positions over the whole row."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.interface import Observation
from verl.data.media.loader import MediaLoader, kinds_in_order
from verl.data.media.references import MediaData, Reference, payload, read_file, reading, sound_of
from verl.data.messages import references
from verl.data.readers import PositionIds
from verl.models.families.interface import KINDS, Kind, MediaShape

MAX_FILE = 256 << 20  # bytes of one that a message names, as of a request to the endpoint


class ConversationMedia:
    """Reads the media of conversations for one model."""

    def __init__(self, loader: MediaLoader, position_ids: PositionIds) -> None:
        self.loader, self.position_ids = loader, position_ids
        self.placeholders = loader.family.placeholders(loader.processor)
        # If kinds share a token, features replace it in the order of the prompt.
        kinds = loader.family.kinds
        self._has_order = len({loader.family.token_kind(kind) for kind in kinds}) < len(kinds)

    def of(
        self, observation: Observation, before: MediaData = None
    ) -> tuple[dict[str, list[Reference]], MediaShape]:
        """Return the media of an observation, by reference and with their bytes: a tool's files may go.

        `before` are the media of the conversation so far.

        Raises:
            ValueError: One cannot be read, or heard.
        """
        media = {
            "images": [_with_bytes("image", ref) for ref in references(observation.images, "image", None)],
            "videos": [_with_bytes("video", ref) for ref in references(observation.videos, "video", None)],
        }
        if media["videos"] and self.loader.hears_videos:
            if (before or {}).get("audios"):
                raise ValueError(
                    "the conversation has audio of its own, which the rollout engine cannot tell apart from"
                    " the sound of videos (`data.use_audio_in_video`)"
                )
            media["sounds"] = [sound_of(video) for video in media["videos"]]
        return media, self.loader.measure(media)

    def with_order(self, media: Mapping[str, Any], token_ids: Sequence[int]) -> Mapping[str, Any]:
        """Add the kinds of media in the order of their placeholders, if features depend on it."""
        kinds = [self.placeholders[token] for token in token_ids if token in self.placeholders]
        return {**media, "order": kinds} if self._has_order else media

    def expand(
        self, piece: list[int], last_token: int, shape: MediaShape, before: MediaShape, order: Sequence[Kind]
    ) -> list[int]:
        """Replace each placeholder of a piece, which follows `last_token`, by its tokens.

        Some models number media, so `before` has the shapes of the row's earlier ones, in `order`.
        """
        token_of = {kind: token for token, kind in self.placeholders.items()}
        earlier = [*(token_of[kind] for kind in order), last_token]
        length = len(self.loader.expand(earlier, before))
        return self.loader.expand(earlier + piece, join_shapes(before, shape))[length:]


def join_media(first: MediaData, second: MediaData) -> MediaData:
    """Return the media of a row, from those before and after some token; None without any."""
    both = [media for media in (first, second) if media and any(media.get(f"{kind}s") for kind in KINDS)]
    if len(both) < 2:
        return both[0] if both else None
    joined: dict[str, Any] = {
        f"{kind}s": [ref for media in both for ref in media.get(f"{kind}s") or ()] for kind in KINDS
    }
    if any(media.get("sounds") for media in both):
        joined["sounds"] = [ref for media in both for ref in media.get("sounds") or ()]
    if any("order" in media for media in both):
        joined["order"] = [kind for media in both for kind in kinds_in_order(media)]
    return joined


def as_lists(media: MediaData) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in (media or {}).items()}


def join_shapes(*shapes: MediaShape) -> MediaShape:
    return MediaShape(
        [image for shape in shapes for image in shape.images],
        [video for shape in shapes for video in shape.videos],
        [audio for shape in shapes for audio in shape.audios],
    )


def _with_bytes(kind: Kind, ref: Reference) -> Reference:
    source = payload(ref)
    if isinstance(source, str):
        with reading(kind, ref):
            source = read_file(source, MAX_FILE)
    options = {key: value for key, value in ref.items() if key != "path"} if isinstance(ref, dict) else {}
    return options | {"bytes": source}
