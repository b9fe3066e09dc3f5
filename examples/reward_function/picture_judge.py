# SPDX-License-Identifier: Apache-2.0
"""A vision-language model judges how well each picture, or video, follows its prompt. See docs/judges.md.

overall = score

score      the judge's score from 0 to 10, divided by 10
verdict    1 if the judge's answer could be read, else 0, and then the score is 0; its mean should stay near 1

The judge is the server `judge`:

    reward_servers.judge.model_path=Qwen/Qwen3-VL-8B-Instruct      # or .url=http://host:8000/v1
    worker.reward.reward_function=examples/reward_function/picture_judge.py:compute_score

It sees `images`, or some frames of `videos`. `prompt_file` is a Jinja file of yours, see
examples/judge_prompt/picture.jinja.
"""

import asyncio
from pathlib import Path
from typing import Any

from verl.rewards.graders import judging
from verl.rewards.graders.chat_media import content_of
from verl.rewards.graders.pictures import as_png, frames_of

REWARD_NAME = "picture_judge"
REWARD_TYPE = "batch"
PROMPT = Path(__file__).resolve().parents[1] / "judge_prompt" / "picture.jinja"


async def compute_score(
    reward_inputs: list[dict[str, Any]],
    servers: dict[str, Any],
    prompt_file: str | None = None,
    num_frames: int = 8,
) -> list[dict[str, float]]:
    async def judge(row: dict[str, Any]) -> dict[str, float]:
        question = judging.render(
            prompt_file or PROMPT,
            prompt=row["prompt"],
            ground_truth=row["ground_truth"],
            is_video="videos" in row,
        )
        seen = {"images": [as_png(image) for image in frames_of(row, num_frames)]}
        message = {"role": "user", "content": await content_of(question, seen)}
        score = judging.read_score(await servers["judge"].ask([message]))
        return {"overall": score or 0.0, "score": score or 0.0, "verdict": float(score is not None)}

    return list(await asyncio.gather(*(judge(row) for row in reward_inputs)))
