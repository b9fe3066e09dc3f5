# SPDX-License-Identifier: Apache-2.0
"""A language model judges all responses to a prompt, in one of four ways. See docs/judges.md.

overall = score

score      pointwise  the judge's score from 0 to 10 for each response, divided by 10
           pairwise   the share of its comparisons with the others that it wins, in both orders
           group      its place in the judge's ranking of all responses: the best 1, the worst 0
           rubric     the weight of the criteria in the row's column `rubric` that it meets
verdict    1 if the judge's answer could be read, else 0, and then the score is 0; its mean should stay near 1

The judge is the server `judge`:

    reward_servers.judge.model_path=Qwen/Qwen3-8B      # or .url=http://host:8000/v1
    worker.reward.reward_function=examples/reward_function/judged.py:compute_score
    worker.reward.reward_function_kwargs='{way: group}'

`prompt_file` is a Jinja file of yours, see examples/judge_prompt.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl.rewards.graders import judging
from verl.rewards.graders.chat_media import content_of

REWARD_NAME = "judged"
REWARD_TYPE = "batch"  # a call has all responses to a prompt
PROMPTS = Path(__file__).resolve().parents[1] / "judge_prompt"

Group = Sequence[dict[str, Any]]
Scores = list[float | None]


async def pointwise(ask: judging.Ask, prompt: Callable[..., str], group: Group) -> Scores:
    answers = await asyncio.gather(*(ask(prompt(response=text)) for text in answers_of(group)))
    return [judging.read_score(answer) for answer in answers]


async def pairwise(ask: judging.Ask, prompt: Callable[..., str], group: Group) -> Scores:
    return await judging.tournament(
        ask, lambda first, second: prompt(first=first, second=second), answers_of(group)
    )


async def in_a_group(ask: judging.Ask, prompt: Callable[..., str], group: Group) -> Scores:
    scores = await judging.rank(ask, lambda responses: prompt(responses=responses), answers_of(group))
    return [None] * len(group) if scores is None else list(scores)


async def by_rubric(ask: judging.Ask, prompt: Callable[..., str], group: Group) -> Scores:
    criteria = judging.read_criteria(group[0]["rubric"])
    texts = [criterion.text for criterion in criteria]
    questions = [prompt(response=text, criteria=texts) for text in answers_of(group)]
    answers = await asyncio.gather(*(ask(question) for question in questions))
    return [judging.read_checklist(answer, criteria) for answer in answers]


WAYS = {"pointwise": pointwise, "pairwise": pairwise, "group": in_a_group, "rubric": by_rubric}


def answers_of(group: Group) -> list[str]:
    return [judging.final_answer(row["response"]) for row in group]


async def compute_score(
    reward_inputs: list[dict[str, Any]],
    servers: dict[str, Any],
    way: str = "pointwise",
    prompt_file: str | None = None,
    shows_media: bool = True,
) -> list[dict[str, float]]:
    if way not in WAYS:
        raise ValueError(f"`way` must be one of {sorted(WAYS)}, got {way!r}")
    groups: dict[Any, list[int]] = {}
    for position, row in enumerate(reward_inputs):
        groups.setdefault(row.get("uid"), []).append(position)
    file = prompt_file or PROMPTS / f"{way}.jinja"
    results: list[dict[str, float]] = [{} for _ in reward_inputs]

    async def judge(positions: list[int]) -> None:
        group = [reward_inputs[position] for position in positions]
        shared = {"prompt": group[0]["prompt"], "ground_truth": group[0]["ground_truth"]}
        media = group[0].get("multi_modal_data") if shows_media else None

        async def ask(question: str) -> str:
            content = await content_of(question, media)
            return await servers["judge"].ask([{"role": "user", "content": content}])

        def prompt(**values: Any) -> str:
            return judging.render(file, **shared, **values)

        for position, score in zip(positions, await WAYS[way](ask, prompt, group), strict=True):
            known = score is not None
            results[position] = {"overall": score if known else 0.0, "verdict": float(known)}

    await asyncio.gather(*(judge(positions) for positions in groups.values()))
    return results
