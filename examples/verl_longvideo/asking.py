# SPDX-License-Identifier: Apache-2.0
"""Ask a model many questions, a bounded number at a time, and keep each answer in a file of the state."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl.rewards.graders.llm_judge import Judge
from verl_longvideo.settings import ModelSettings, Settings
from verl_longvideo.state import digest_of, read_state, write_state

HOPELESS = 5  # failures before any answer, after which nothing more is asked
FAILURES = (ValueError, TimeoutError, RuntimeError, OSError)

Messages = list[Any]  # of the chat protocol


class Question(NamedTuple):
    """A question, built when it is due, and the file of its answer."""

    name: str  # for errors: a clip or a video and its category
    file: Path
    digest: str
    messages: Callable[[], Messages]

    def answer(self) -> str | None:
        """Return the saved answer; None if there is none yet."""
        kept = read_state(self.file, self.digest)
        return None if kept is None else kept["answer"]


@dataclass
class Asked:
    """Outcome of a step's questions."""

    answered: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # reasons by name
    num_left: int = 0  # not asked, since the step was given up


def question(name: str, file: Path, model: ModelSettings, facts: Sequence[Any], messages: Any) -> Question:
    """Return a question; `facts` are all that its messages are made from, apart from the model."""
    return Question(name, file, digest_of(model.identity, list(facts)), messages)


def text_message(text: str) -> Messages:
    """Return a conversation of one message of the user."""
    return [{"role": "user", "content": text}]


def judge_of(model: ModelSettings, settings: Settings) -> Judge:
    """Return the client of a model; a ValueError says what is wrong with its address or key."""
    return Judge(
        model.url, model.model, api_key_env=model.key_env, max_concurrency=settings.concurrency,
        max_retries=settings.max_retries, timeout_s=settings.timeout_s, temperature=model.temperature,
        max_tokens=model.max_tokens,
    )  # fmt: skip


def ask_all(
    judge: Judge, questions: Iterable[Question], concurrency: int, on_end: Callable[[], None]
) -> Asked:
    """Ask the questions and write their answers; call `on_end` after each.

    A question that fails after all retries is left for the next command. If the server cannot be reached, or
    the first questions all fail, the others are not asked.
    """
    asked, left = Asked(), iter(questions)
    asyncio.run(_work_on(judge, left, concurrency, asked, on_end))
    asked.num_left = sum(1 for _ in left)
    return asked


async def _work_on(
    judge: Judge, left: Iterator[Question], concurrency: int, asked: Asked, on_end: Callable[[], None]
) -> None:
    is_over = False

    async def work() -> None:
        nonlocal is_over
        for one in left:
            try:
                messages = await asyncio.to_thread(one.messages)
                answer = await judge.ask(messages)
            except FAILURES as error:
                asked.failed[one.name] = str(error)
                is_hopeless = not asked.answered and len(asked.failed) >= HOPELESS
                is_over = is_over or is_hopeless or isinstance(error, ConnectionError)
            else:
                write_state(one.file, one.digest, {"name": one.name, "answer": answer})
                asked.answered += 1
            on_end()
            if is_over:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
