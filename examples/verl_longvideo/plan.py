# SPDX-License-Identifier: Apache-2.0
"""The plan of a command, for `--dry-run`: existing files, clips to cut, questions to ask. Writes nothing."""

import math
from collections.abc import Iterator

from verl_longvideo.captions import caption_question, clock
from verl_longvideo.clips import duration_of
from verl_longvideo.pipeline import sources_of
from verl_longvideo.rows import split_videos
from verl_longvideo.settings import Settings


def plan(settings: Settings) -> Iterator[str]:
    """Yield the lines of the plan; videos that cannot be opened are named."""
    sources = sources_of(settings)
    new_clips = asked = there = 0
    seconds, unread = 0.0, []
    for source in sources:
        if (clips := source.done()) is not None:
            seconds += clips[-1].end
            there += len(clips)
            digest = source.digest
            asked += sum(caption_question(clip, settings, digest).answer() is None for clip in clips)
            continue
        try:
            length = duration_of(source.file)
        except (ValueError, OSError) as error:
            unread.append(f"  {source.name}: {error}")
            continue
        seconds += length
        new_clips += max(1, math.ceil(length / settings.cut.seconds))
    yield f"videos    {len(sources)}, {clock(seconds)} in all"
    yield f"split     {there} clips are there, about {new_clips} are to be cut"
    if settings.does("caption"):
        yield f"caption   about {asked + new_clips} requests to {settings.caption.model}"
    number = (len(sources) - len(unread)) * len(settings.prompts.categories) * settings.questions
    if settings.does("reason"):
        yield f"reason    at most {number} requests to {settings.reason.model}, less what is there"
    if settings.does("reformat"):
        split = split_videos(settings.videos, settings.val_videos, settings.sft_share, settings.seed)
        rest = len(sources) - len(split.val) - len(split.sft)
        yield f"reformat  at most {number if settings.rewrite else 0} requests, less what is there"
        yield f"videos    {rest} to train, {len(split.sft)} to fine-tune, {len(split.val)} to validate"
    if unread:
        yield f"{len(unread)} videos cannot be read:"
        yield from unread
