# SPDX-License-Identifier: Apache-2.0
r"""Rows of public data sets as rows of this project: `problem`, `answer`, media and what else they tell.

One function for each data set, registered in `CONVERTERS` under the name that `scripts/convert_data.py`
takes. A row that cannot be used raises `BadRowError` with the reason. To add a data set: one such function,
and the types of columns that no other has in `COLUMN_TYPES`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets

from verl.data.bad_rows import BadRowError
from verl.data.files import Row
from verl.data.messages import MARKERS
from verl.rewards.graders.math import last_boxed
from verl.utils.registry import Registry

# Every column that a converted file may have, in this order; those that all rows leave empty are left out.
COLUMN_TYPES = {
    "problem": datasets.Value("string"),
    "answer": datasets.Value("string"),
    "images": datasets.List(datasets.Image()),
    "videos": datasets.List(datasets.Value("string")),
    "response": datasets.Value("string"),
    "solution": datasets.Value("string"),
    "level": datasets.Value("int64"),
    "subject": datasets.Value("string"),
    "choices": datasets.List(datasets.Value("string")),
    "ability": datasets.Value("string"),
    "id": datasets.Value("string"),
    "data_source": datasets.Value("string"),
}

IMAGE_MARKER, VIDEO_MARKER = (
    next(marker for marker, kind in MARKERS.items() if kind == wanted) for wanted in ("image", "video")
)
GSM8K_CALCULATION = re.compile(r"<<[^<>]*>>")
TAGGED_THOUGHT = re.compile(r"\s*<think>(.*)</think>\s*", re.DOTALL)
TAGGED_ANSWER = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
BARE_BOXED = re.compile(r"\\boxed\s+([^\s{}$]+)")  # a few rows of MATH: `\boxed 5`
DAPO_HEAD = re.compile(r"\s*Solve the following math problem step by step\.[^\n]*\$Answer[^\n]*\n+")
DAPO_TAIL = re.compile(r'\s*Remember to put your answer on its own line after "Answer:"\.?\s*\Z')


@dataclass(frozen=True)
class Converter:
    """How the rows of one data set become ours.

    Attributes:
        function: A row of theirs to one of ours; raises BadRowError where it cannot.
        hub_names: Data sets on the hub whose rows it takes.
        columns: Columns that rows must have; `a|b` asks for one of the two.
        example: The script in `examples/` that trains on such rows.
        subset: The folder of the hub's data set that holds the rows, where there are several; else None.
    """

    function: Callable[[Row], Row]
    hub_names: tuple[str, ...]
    columns: tuple[str, ...]
    example: str
    subset: str | None = None

    def __call__(self, row: Row) -> Row:
        """Convert a row; columns that say nothing are left out."""
        converted = {"data_source": self.hub_names[0]} | self.function(row)
        for column in ("problem", "answer"):
            if not converted[column].strip():
                raise BadRowError(f"the {column} is empty")
        return {column: value for column, value in converted.items() if value is not None}

    @property
    def summary(self) -> str:
        """What the data set is, in one line."""
        assert self.function.__doc__ is not None, "a registered function has a docstring"
        return self.function.__doc__.partition("\n")[0].rstrip(".")


CONVERTERS: Registry[Converter] = Registry("dataset")


def converter(
    name: str, *hub_names: str, columns: str, example: str, subset: str | None = None
) -> Callable[[Callable[[Row], Row]], Callable[[Row], Row]]:
    """Return a decorator that registers a function as the converter `name`; see `Converter`.

    Args:
        name: What the command calls it.
        hub_names: Data sets on the hub, the main one first.
        columns: Names with spaces between them.
        example: Name of a script of the examples.
        subset: Folder of the hub's data set.
    """

    def decorator(function: Callable[[Row], Row]) -> Callable[[Row], Row]:
        CONVERTERS.register(name)(Converter(function, hub_names, tuple(columns.split()), example, subset))
        return function

    return decorator


@converter("gsm8k", "openai/gsm8k", columns="question answer", example="qwen2_5_7b_math_grpo", subset="main")
def gsm8k(row: Row) -> Row:
    """Grade-school mathematics; the result is a whole number.

    Their answer is the whole solution, with the result behind `####` and calculations in `<<48/2=24>>`.
    """
    solution, marker, result = _text(row, "answer").rpartition("####")
    if not marker:
        raise BadRowError("the answer has no result behind ####")
    return {
        "problem": _text(row, "question"),
        "answer": result.replace(",", "").strip(),
        "solution": GSM8K_CALCULATION.sub("", solution).strip(),
    }


@converter(
    "math",
    "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hiyouga/math12k",
    columns="problem answer|solution", example="qwen2_5_7b_math_grpo",
)  # fmt: skip
def math(row: Row) -> Row:
    r"""Competition mathematics; the answer is LaTeX.

    The answer is their column `answer` or, without it, the last `\boxed{}` of the solution.
    """
    answer = row.get("answer") or _boxed(_text(row, "solution"))
    if answer is None:
        raise BadRowError(r"the solution has no \boxed{}")
    level = re.search(r"\d+", str(row.get("level")))  # `Level 3`, 3, or `Level ?`
    return {
        "problem": _text(row, "problem"),
        "answer": answer,
        "solution": row.get("solution"),
        "level": int(level[0]) if level else None,
        "subject": row.get("subject") or row.get("type"),
        "id": row.get("unique_id"),
    }


@converter(
    "dapo17k",
    "BytedTsinghua-SIA/DAPO-Math-17k",
    columns="prompt reward_model",
    example="qwen3_14b_dapo17k_dapo",
)
def dapo17k(row: Row) -> Row:
    """Competition mathematics; the answer is a whole number.

    Each of about 17 thousand problems stands in a hundred rows. Their prompts say how to write the
    answer; that is cut off, for the template says it.
    """
    return {
        "problem": _without_dapo_instructions(_single_message(row["prompt"])),
        "answer": _text(row["reward_model"] or {}, "ground_truth"),
        "ability": row.get("ability"),
        "id": (row.get("extra_info") or {}).get("index"),
        "data_source": row.get("data_source"),
    }


@converter(
    "geometry3k", "hiyouga/geometry3k", columns="images problem answer", example="qwen2_5_vl_7b_geo3k_grpo"
)
def geometry3k(row: Row) -> Row:
    """Geometry with a figure; the answer is LaTeX."""
    identity = row.get("id")
    return _with_images(row, row["images"], _text(row, "answer")) | {
        "choices": row.get("choices"),
        "id": None if identity is None else str(identity),
    }


@converter(
    "clevr",
    "BUAADreamer/clevr_count_70k", "leonardPKU/clevr_cogen_a_train",
    columns="images|image problem answer|solution", example="qwen2_5_vl_3b_clevr",
)  # fmt: skip
def clevr(row: Row) -> Row:
    """Counting the objects in a rendered scene.

    The answer is their column `answer` or `solution`, without the tags of `<answer> 3 </answer>`.
    """
    return _with_images(row, _either(row, "images", "image"), _untagged(row))


@converter(
    "geoqa8k",
    "leonardPKU/GEOQA_8K_R1V", "leonardPKU/GEOQA_R1V_Train_8K",
    columns="images|image problem answer|solution", example="qwen2_5_vl_3b_geoqa8k",
)  # fmt: skip
def geoqa8k(row: Row) -> Row:
    """Geometry with a figure; the answer is an angle or a length, tagged as in `clevr`."""
    return _with_images(row, _either(row, "images", "image"), _untagged(row))


@converter(
    "longvideo_reason",
    "LongVideo-Reason/longvideo-reason",
    columns="problem answer videos", example="qwen2_5_vl_3b_video_grpo",
)  # fmt: skip
def longvideo_reason(row: Row) -> Row:
    """Questions about long videos; the answer is the letter of a choice.

    `response` is their reasoning and the answer, as `examples/format_prompt/r1v.jinja` asks for them: with it
    the rows are data for supervised fine-tuning too. Rows without reasoning have none. Videos are paths.
    """
    videos = row["videos"] if isinstance(row["videos"], list) else [row["videos"]]
    if not videos or not all(isinstance(video, str) and video for video in videos):
        raise BadRowError("`videos` must be the path of a video, or a list of paths")
    answer, problem_id = _untagged(row), row.get("problem_id")
    return {
        "problem": VIDEO_MARKER * len(videos) + _text(row, "problem").replace(VIDEO_MARKER, ""),
        "answer": answer,
        "videos": videos,
        "response": _thought(row, answer),
        "subject": row.get("problem_type"),
        "id": None if problem_id is None else str(problem_id),
    }


def _thought(row: Row, answer: str) -> str | None:
    """The reasoning and the answer in the tags that r1v's format has; None without reasoning."""
    if not row.get("reasoning"):
        return None
    reasoning = _text(row, "reasoning")
    tagged = TAGGED_THOUGHT.fullmatch(reasoning)
    reasoning = (tagged[1] if tagged else reasoning).strip()
    if any(tag in reasoning for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        raise BadRowError("the reasoning holds tags of the form of a response")
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise BadRowError(f"`{column}` must be text, got {type(value).__name__}")
    return value


def _either(row: Row, first: str, second: str) -> Any:
    """The first column that has a value."""
    value = row.get(first)
    return row.get(second) if value is None else value


def _boxed(solution: str) -> str | None:
    r"""The last boxed result; `\fbox{}` and `\boxed 5` are what a few rows of MATH write."""
    solution = solution.replace(r"\fbox{", r"\boxed{")
    bare = BARE_BOXED.findall(solution)
    return last_boxed(solution) or (bare[-1] if bare else None)


def _untagged(row: Row) -> str:
    answer = _either(row, "answer", "solution")
    text = str(answer) if isinstance(answer, int) else _text({"answer": answer}, "answer")
    tagged = TAGGED_ANSWER.fullmatch(text)
    return (tagged[1] if tagged else text).strip()


def _with_images(row: Row, images: Any, answer: str) -> Row:
    """A row whose problem has one marker for each image; without any, the images come first."""
    images = [] if images is None else images if isinstance(images, list) else [images]
    problem = _text(row, "problem")
    markers = problem.count(IMAGE_MARKER)
    if not images:
        raise BadRowError("the row has no image")
    if markers not in (0, len(images)):
        raise BadRowError(f"the problem has {markers} {IMAGE_MARKER} but the row has {len(images)} images")
    if markers == 0:
        problem = IMAGE_MARKER * len(images) + problem
    return {"problem": problem, "answer": answer, "images": images}


def _single_message(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or len(prompt) != 1 or prompt[0].get("role") != "user":
        raise BadRowError("the prompt is not one message of the user")
    return _text(prompt[0], "content")


def _without_dapo_instructions(prompt: str) -> str:
    head, tail = DAPO_HEAD.match(prompt), DAPO_TAIL.search(prompt)
    if (head is None) != (tail is None):
        raise BadRowError("the prompt has half of the instructions around a problem")
    return prompt if head is None or tail is None else prompt[head.end() : tail.start()].strip()
