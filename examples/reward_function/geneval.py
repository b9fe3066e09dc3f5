# SPDX-License-Identifier: Apache-2.0
"""Whether the objects of a prompt are in its picture, as a detector behind an endpoint finds.

overall = strict if `is_strict`, else score

score      share of the checks that are met: objects, their counts, colors and places
strict     1 if all are met

GenEval (https://arxiv.org/abs/2310.11513) describes what a prompt asks for in the row's column `metadata`:
`{"tag": "counting", "include": [{"class": "dog", "count": 2}]}`. The environment variable GENEVAL_URL names a
server with an object detector, which answers a POST of JSON:

    {"pictures": [{"image": PNG in base64, "metadata": {...}}, ...]}
    {"results": [{"score": 0.5, "strict": false}, ...]}               one for each picture, in order
"""

import base64
import json
import os
from typing import Any

import aiohttp

from verl.rewards.graders.pictures import as_png, frames_of

REWARD_NAME = "geneval"
REWARD_TYPE = "batch"
URL = "GENEVAL_URL"
TIMEOUT_S = 60.0


def question_of(row: dict[str, Any]) -> dict[str, Any]:
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    if not isinstance(metadata, dict) or "include" not in metadata:
        raise ValueError(
            f"a row needs a column `metadata` with what GenEval looks for, `include`, got {metadata}"
        )
    (image,) = frames_of(row, 1)
    return {"image": base64.b64encode(as_png(image)).decode(), "metadata": metadata}


async def ask(url: str, questions: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session,
        session.post(url, json={"pictures": questions}) as answer,
    ):
        results = (await answer.json()).get("results")
    if not isinstance(results, list) or len(results) != len(questions):
        raise ValueError(f"{url} must answer `results` for {len(questions)} pictures, got {results!r:.200}")
    return results


async def compute_score(
    reward_inputs: list[dict[str, Any]], is_strict: bool = False, timeout_s: float = TIMEOUT_S
) -> list[dict[str, float]]:
    url = os.environ.get(URL)
    if not url:
        raise ValueError(f"the environment variable {URL} must be the URL of a server of GenEval checks")
    results = await ask(url, [question_of(row) for row in reward_inputs], timeout_s)
    scores = [{"score": float(one["score"]), "strict": float(one["strict"])} for one in results]
    return [{"overall": one["strict" if is_strict else "score"], **one} for one in scores]
