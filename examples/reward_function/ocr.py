# SPDX-License-Identifier: Apache-2.0
"""How well a picture shows the text that its prompt asks for, in double quotes: `A sign that says "open"`.

overall = accuracy

accuracy   1 - distance / length, at least 0; 1 if the wanted text is anywhere in the picture. The distance is
           the number of letters to insert, delete or replace; case and spaces do not count. Of a video the
           mean of its frames

Source: Flow-GRPO, section 4.1, visual text rendering (https://arxiv.org/abs/2505.05470). Tesseract reads the
pictures: `pip install pytesseract`, and the program `tesseract`. A prompt without quotes asks for the ground
truth.
"""

import re
from typing import Any

from PIL import Image

from verl.rewards.graders.pictures import frames_of

REWARD_NAME = "ocr"
REWARD_TYPE = "sequential"
QUOTED = re.compile(r'"([^"]+)"')


def read_text(image: Image.Image) -> str:
    try:
        import pytesseract  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reading pictures needs Tesseract: pip install pytesseract") from error
    return pytesseract.image_to_string(image)


def wanted_text(reward_input: dict[str, Any]) -> str:
    found = QUOTED.findall(str(reward_input["prompt"]))
    text = plain(" ".join(found) if found else str(reward_input["ground_truth"] or ""))
    if not text:
        raise ValueError(
            f"the prompt {reward_input['prompt']!r} must have the wanted text in double quotes, or the row a"
            " ground truth"
        )
    return text


def plain(text: str) -> str:
    return "".join(text.split()).lower()


def distance(one: str, other: str) -> int:
    """Return the edit distance of two texts (Levenshtein)."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, its in enumerate(other, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (letter != its))
    return row[-1]


def accuracy(text: str, wanted: str) -> float:
    if wanted in plain(text):
        return 1.0
    return max(0.0, 1 - distance(plain(text), wanted) / len(wanted))


def compute_score(reward_input: dict[str, Any], num_frames: int = 8) -> dict[str, float]:
    wanted = wanted_text(reward_input)
    found = [accuracy(read_text(image), wanted) for image in frames_of(reward_input, num_frames)]
    return {"overall": sum(found) / len(found), "accuracy": sum(found) / len(found)}
