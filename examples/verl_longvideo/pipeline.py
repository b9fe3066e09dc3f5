# SPDX-License-Identifier: Apache-2.0
"""The six steps from videos to rows: split, caption, merge, reason, parse, reformat.

Each step does what is missing for all videos; the next one begins with the complete videos.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from threading import Event
from typing import Any, NamedTuple, TypeVar

from verl_longvideo.asking import Question, ask_all, judge_of
from verl_longvideo.captions import Timeline, caption_question, timeline_of
from verl_longvideo.clips import Clip, Source, cut
from verl_longvideo.questions import (
    Asking,
    Item,
    MalformedError,
    as_dict,
    askings,
    parse,
    prose_of,
    reason_question,
    rewrite_question,
)
from verl_longvideo.rows import split_videos, write_rows
from verl_longvideo.settings import STEPS, ModelSettings, Settings

MALFORMED, PARSED, REPORT = "malformed.jsonl", "parsed.jsonl", "report.json"

K = TypeVar("K")
T = TypeVar("T")
Reader = Callable[[Asking, str], T]  # of a reply; raises MalformedError
Counting = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


class Problem(NamedTuple):
    """Something that is left out of the rows."""

    step: str
    name: str  # of a video, a clip or a question
    reason: str


@dataclass
class Report:
    """Outcome of a command."""

    unfinished: list[Problem] = field(default_factory=list)  # the same command tries them again
    malformed: list[Problem] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # a sentence for each step
    rows: dict[str, int] = field(default_factory=dict)  # by file
    by_category: dict[str, int] = field(default_factory=dict)  # questions that can be used
    by_answer: dict[str, int] = field(default_factory=dict)


class GivenUpError(RuntimeError):
    """A step that stopped because the model does not answer."""


class Pipeline:
    """Runs the steps.

    Args:
        counting: Opens a progress bar with a title and a number of parts; what it yields is called for each.
        say: Writes a line for each step.

    Raises:
        ValueError: The address or the key of a model is wrong.
    """

    def __init__(self, settings: Settings, counting: Counting, say: Callable[[str], None]) -> None:
        self.settings, self.counting, self.say = settings, counting, say
        self.report = Report()
        self.sources = sources_of(settings)
        self.clips: dict[str, list[Clip]] = {}  # by video
        self.captions: dict[Clip, str] = {}
        self.timelines: list[Timeline] = []
        self.replies: dict[Asking, str] = {}
        self.items: dict[Asking, Item] = {}
        for model in settings.models:  # a wrong address is told before anything is cut
            judge_of(model, settings)

    def run(self) -> Report:
        """Do the steps up to `settings.until`.

        Raises:
            GivenUpError: A model does not answer.
            OSError: A file cannot be written.
        """
        for step in STEPS:
            if self.settings.does(step):
                getattr(self, step)()
        self._write(REPORT, json.dumps(asdict(self.report), indent=2) + "\n")
        return self.report

    def split(self) -> None:
        """Cut the videos that are not cut yet."""
        new = []
        for source in self.sources:
            if (done := source.done()) is None:
                new.append(source)
            else:
                self.clips[source.name] = done
        with self.counting("split", len(new)) as count:
            for source, result in zip(new, _cut_all(new, self.settings.workers), strict=True):
                if isinstance(result, str):
                    self.report.unfinished.append(Problem("split", source.name, result))
                else:
                    self.clips[source.name] = result
                count()
        number = sum(map(len, self.clips.values()))
        self._line("split", f"{len(self.clips)} of {len(self.sources)} videos, {number} clips", len(new))

    def caption(self) -> None:
        """Ask for the captions that are missing."""
        questions = {
            clip: caption_question(clip, self.settings, source.digest)
            for source in self.sources
            for clip in self.clips.get(source.name, ())
        }
        self.captions = self._ask("caption", self.settings.caption, questions)

    def merge(self) -> None:
        """Write the timeline of each video that has all its captions."""
        whole = [clips for clips in self.clips.values() if all(clip in self.captions for clip in clips)]
        for clips in sorted(whole):
            timeline = timeline_of(clips, [self.captions[clip] for clip in clips])
            self._write(f"timelines/{timeline.video}.txt", f"{timeline.text}\n")
            self.timelines.append(timeline)
        self._line("merge", f"{len(whole)} of {len(self.clips)} videos have all their captions")

    def reason(self) -> None:
        """Ask for the questions that are missing."""
        questions = {
            asking: reason_question(asking, timeline, self.settings)
            for timeline in self.timelines
            for asking in askings(timeline.video, self.settings)
        }
        self._forget_malformed(questions, parse)
        self.replies = self._ask("reason", self.settings.reason, questions)

    def parse(self) -> None:
        """Read the replies, and list the malformed ones."""
        self.items = self._usable("parse", self.replies, parse)
        self._write(PARSED, "".join(f"{json.dumps(as_dict(item))}\n" for item in self.items.values()))
        self._line("parse", f"{len(self.items)} of {len(self.replies)} replies can be used")

    def reformat(self) -> None:
        """Rewrite the reasons as prose, and write the rows."""
        settings = self.settings
        if settings.rewrite:
            questions = {asking: rewrite_question(item, settings) for asking, item in self.items.items()}
            self._forget_malformed(questions, prose_of)
            texts = self._ask("reformat", settings.reason, questions)
        else:
            texts = {asking: "\n".join(item.reasons) for asking, item in self.items.items()}
        prose = self._usable("reformat", texts, prose_of)
        rows = [(self.items[asking], text) for asking, text in prose.items()]
        split = split_videos(settings.videos, settings.val_videos, settings.sft_share, settings.seed)
        self.report.rows = write_rows(settings.out, rows, split, settings.prompts)
        self.report.by_category = dict(Counter(item.asking.category for item, _ in rows))
        self.report.by_answer = dict(sorted(Counter(item.answer for item, _ in rows).items()))
        written = ", ".join(f"{name} ({number})" for name, number in self.report.rows.items())
        self._line("rows", f"{len(rows)} questions: {written}")

    def _ask(self, step: str, model: ModelSettings, questions: Mapping[K, Question]) -> dict[K, str]:
        """Ask the questions without an answer; return all answers so far."""
        missing = [one for one in questions.values() if one.answer() is None]
        with self.counting(step, len(missing)) as count:
            asked = ask_all(judge_of(model, self.settings), missing, self.settings.concurrency, count)
        self.report.unfinished += [Problem(step, name, reason) for name, reason in asked.failed.items()]
        answers = {key: answer for key, one in questions.items() if (answer := one.answer()) is not None}
        self._line(step, f"{len(answers)} of {len(questions)} answers", asked.answered)
        if asked.num_left:
            raise GivenUpError(
                f"{step}: {asked.num_left} requests were not sent, since the first ones failed:"
                f" {next(iter(asked.failed.values()))}"
            )
        return answers

    def _usable(self, step: str, replies: Mapping[Asking, str], read: Reader[T]) -> dict[Asking, T]:
        """Read replies; malformed ones are listed in a file."""
        found: dict[Asking, T] = {}
        for asking, reply in replies.items():
            try:
                found[asking] = read(asking, reply)
            except MalformedError as error:
                self.report.malformed.append(Problem(step, asking.name, str(error)))
        lines = [json.dumps(problem._asdict()) for problem in self.report.malformed]
        self._write(MALFORMED, "".join(f"{line}\n" for line in lines))
        return found

    def _forget_malformed(self, questions: Mapping[Asking, Question], read: Reader[Any]) -> None:
        """Remove unusable answers if they are to be asked for again."""
        if not self.settings.retry_malformed:
            return
        for asking, one in questions.items():
            if (reply := one.answer()) is not None:
                try:
                    read(asking, reply)
                except MalformedError:
                    one.file.unlink()

    def _write(self, name: str, text: str) -> None:
        path = self.settings.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.tmp")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)

    def _line(self, step: str, text: str, new: int | None = None) -> None:
        self.report.lines.append(f"{step:8}  {text}" + ("" if new is None else f"; {new} new"))
        self.say(self.report.lines[-1])


def sources_of(settings: Settings) -> list[Source]:
    """Return the videos with the folders of their clips."""
    return [
        Source(name, settings.video_dir / name, settings.out / "clips" / name, settings.cut)
        for name in settings.videos
    ]


def _cut_all(sources: Sequence[Source], workers: int) -> Iterator[list[Clip] | str]:
    """Cut videos in threads; yield the clips of each, or why it cannot be read. Stops between clips."""
    stop = Event()

    def cut_one(source: Source) -> list[Clip] | str:
        try:
            return cut(source, stop.is_set)
        except ValueError as error:
            return str(error)

    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(cut_one, sources)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
