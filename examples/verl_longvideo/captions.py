# SPDX-License-Identifier: Apache-2.0
"""Steps 2 and 3, caption and merge: describe each clip, and join the captions of a video in its timeline."""

import base64
import io
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from verl_longvideo.asking import Messages, Question, question
from verl_longvideo.clips import Clip, frames_of
from verl_longvideo.prompts import CAPTION
from verl_longvideo.settings import AS_VIDEO, Settings

JPEG_QUALITY = 85


class Timeline(NamedTuple):
    """The captions of a video in order."""

    video: str
    duration: float  # seconds
    text: str


def caption_question(clip: Clip, settings: Settings, cut_digest: str) -> Question:
    """Return the question that asks for the caption of a clip."""
    values = {"video": clip.video, "start": clock(clip.start), "end": clock(clip.end)}
    prompt = settings.prompts.render(CAPTION, values)
    sent = [settings.clips_as, settings.frames if settings.clips_as != AS_VIDEO else 0]
    file = settings.out / "captions" / clip.video / f"{clip.number:05d}.json"
    name = f"{clip.video}, {values['start']} - {values['end']}"
    facts = [prompt, *sent, cut_digest, clip.number]
    return question(name, file, settings.caption, facts, partial(_messages, clip, prompt, settings))


def timeline_of(clips: Sequence[Clip], captions: Sequence[str]) -> Timeline:
    """Join the captions of all clips of a video: a line for each, with its time in front."""
    lines = [
        f"[{clock(clip.start)} - {clock(clip.end)}] {' '.join(caption.split())}"
        for clip, caption in zip(clips, captions, strict=True)
    ]
    return Timeline(clips[0].video, clips[-1].end, "\n".join(lines))


def clock(seconds: float) -> str:
    """Return a time as `0:01:40`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _messages(clip: Clip, prompt: str, settings: Settings) -> Messages:
    parts: list[Any] = [{"type": "text", "text": prompt}]
    if settings.clips_as == AS_VIDEO:
        content = base64.b64encode(clip.file.read_bytes()).decode()
        url = {"url": f"data:video/mp4;base64,{content}"}
        return [{"role": "user", "content": [*parts, {"type": "video_url", "video_url": url}]}]
    for image in frames_of(clip.file, settings.frames):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=JPEG_QUALITY)
        content = base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{content}"}})
    return [{"role": "user", "content": parts}]
