# SPDX-License-Identifier: Apache-2.0
"""The shipped ways to judge in the pool of reward processes, against a small real server."""

import pytest

from tests.architecture.source import ROOT
from tests.helpers.chat_server import ChatServer, Reply, image_of
from tests.helpers.media import save_image
from verl.config.reward_servers import RewardServerConfig
from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import RewardManager
from verl.rewards.servers import specs_of

FILE = f"{ROOT / 'examples' / 'reward_function' / 'judged.py'}:compute_score"


def rows(*responses, **columns):
    shared = {"prompt": "Name a prime.", "ground_truth": "any", "uid": "u", **columns}
    return [{"response": f"<think>hm</think>{text}", **shared} for text in responses]


def by_numbers(body):
    """A judge that prefers larger numbers."""
    text = body["messages"][0]["content"]
    found = [int(part.split("\n")[1]) for part in text.split("<answer")[1:]]
    if "Compare two" in text:
        return Reply("[[A]]" if found[0] > found[1] else "[[B]]")
    if "Rank" in text:
        order = sorted(range(len(found)), key=lambda index: -found[index])
        return Reply(" > ".join(f"[{index + 1}]" for index in order))
    if "Check" in text:
        return Reply(f"1: {'yes' if found[0] > 5 else 'no'}\n2: yes")
    return Reply(f"Score: {found[0]}")


nightly = pytest.mark.nightly("verl/rewards", "examples")


@pytest.mark.parametrize(
    ("way", "scores", "num_questions"),
    [
        ("pointwise", [0.3, 0.9, 0.7], 3),
        pytest.param("pairwise", [0, 1, 0.5], 6, marks=nightly),
        pytest.param("group", [0, 1, 0.5], 1, marks=nightly),
        # a weight of 3 for a number above 5, and 1 for any number
        pytest.param("rubric", [0.25, 1, 1], 3, marks=nightly),
    ],
)
def test_each_way_judges_a_group(way, scores, num_questions):
    with ChatServer(by_numbers) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        options = RewardConfig(reward_function=FILE, reward_function_kwargs={"way": way})
        with RewardManager(options, None, servers) as manager:
            job = manager.start()
            rubric = [{"criterion": "above 5", "weight": 3}, "a number"]
            job.submit(range(3), rows("3", "9", "7", rubric=rubric))
            values = job.result()

    assert values == {"overall": pytest.approx(scores), "verdict": [1.0] * 3}
    assert len(server.requests) == num_questions


def test_the_groups_of_a_call_are_judged_apart():
    inputs = [*rows("3", "9"), *rows("1", "2", uid="v")]
    with ChatServer(by_numbers) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        scores = load_reward_function(FILE, {"way": "group"}, servers=servers).score(inputs)

    assert [each["overall"] for each in scores] == [0, 1, 0, 1]


def test_an_answer_that_cannot_be_read_earns_nothing_and_is_counted():
    with ChatServer(Reply("[1] > [3]")) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        scores = load_reward_function(FILE, {"way": "group"}, servers=servers).score(rows("3", "9"))

    assert scores == [{"overall": 0.0, "verdict": 0.0}] * 2


def test_a_prompt_of_ones_own_and_the_media_of_the_row_reach_the_judge(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("Is {{ response }} an answer to {{ prompt }}")
    media = {"images": [save_image(tmp_path / "a.png", 30, 20)]}
    with ChatServer(Reply("Score: 5")) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        reward = load_reward_function(FILE, {"prompt_file": str(file)}, servers=servers)
        reward.score(rows("3", multi_modal_data=media))

    image, text = server.requests[0]["messages"][0]["content"]
    assert image_of(image).size == (30, 20)
    assert text["text"] == "Is 3 an answer to Name a prime."


def test_an_unknown_way_is_an_error():
    servers = specs_of({"judge": RewardServerConfig(url="http://host/v1")})

    with pytest.raises(ValueError, match="`way` must be one of"):
        load_reward_function(FILE, {"way": "best"}, servers=servers).score(rows("3"))
