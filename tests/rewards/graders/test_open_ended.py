# SPDX-License-Identifier: Apache-2.0
"""The reward of `worker.rollout.open_ended_reward`, against a small real server."""

import pytest

from tests.helpers.chat_server import ChatServer, Reply, image_of
from tests.helpers.media import save_image, save_video
from verl.config.reward_servers import RewardServerConfig
from verl.config.worker import OPEN_ENDED, RewardConfig, WorkerConfig
from verl.rewards.function import load_reward_function
from verl.rewards.graders import open_ended
from verl.rewards.manager import RewardManager
from verl.rewards.servers import specs_of

FRAMED = "<think>Lovelace?</think> <answer>Ada L.</answer>"


def row(response, **columns):
    return {"prompt": "Who?", "response": response, "ground_truth": "Ada Lovelace", **columns}


def score(server, *inputs, **kwargs):
    return load_reward_function(OPEN_ENDED, {"base_url": server.url, "model": "m", **kwargs}).score(inputs)


@pytest.mark.parametrize(
    ("reply", "response", "overall"),
    [
        ("Yes.", FRAMED, 0.9 + 0.1),
        ("no", FRAMED, 0.1),
        ("yes", "It was Ada.", 0.9),
        ("No, it is not.", "It was Grace.", 0.0),
    ],
)
def test_the_score_is_nine_tenths_the_verdict_and_one_tenth_the_format(reply, response, overall):
    with ChatServer(Reply(reply)) as server:
        (scores,) = score(server, row(response))

    assert scores["overall"] == pytest.approx(overall)
    assert scores["verdict"] == 1.0


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("yes", True),
        ("**Yes**, they agree.", True),
        ("NO", False),
        ("<think>no, or yes?</think>\n Yes", True),
        ("Not sure.", None),
        ("I say yes", None),
        ("yesterday", None),
        ("<think>yes", None),
    ],
)
def test_the_verdict_is_the_first_word_after_the_judges_thoughts(answer, verdict):
    assert open_ended.read_verdict(answer) is verdict


def test_a_judge_without_a_verdict_earns_nothing_and_is_counted():
    with ChatServer(Reply("Hm.")) as server:
        (scores,) = score(server, row(FRAMED))

    assert scores == {"overall": pytest.approx(0.1), "accuracy": 0.0, "format": 1.0, "verdict": 0.0}


def test_the_judge_sees_the_answer_without_thoughts_and_tags():
    with ChatServer(Reply("yes")) as server:
        score(server, row(FRAMED), row("<think>a</think> It was Ada."))

    asked = sorted(request["messages"][1]["content"] for request in server.requests)
    shown = "<question>\nWho?\n</question>\n<reference>\nAda Lovelace\n</reference>\n<answer>\n{}\n</answer>"
    assert asked == [shown.format("Ada L."), shown.format("It was Ada.")]


def test_the_judge_sees_the_images_and_a_bounded_number_of_frames_before_the_question(tmp_path):
    media = {
        "images": [save_image(tmp_path / "a.png", 30, 20)],
        "videos": [save_video(tmp_path / "a.mp4", 64, 48, num_frames=32)],
    }
    with ChatServer(Reply("yes")) as server:
        score(server, row(FRAMED, multi_modal_data=media), max_frames=3)

    image, *frames, text = server.requests[0]["messages"][1]["content"]
    assert image_of(image).size == (30, 20)
    assert [image_of(frame).size for frame in frames[1::2]] == [(64, 48)] * 3
    assert text["text"].startswith("<question>\nWho?")


def test_a_judge_that_reads_text_only_gets_no_media(tmp_path):
    media = {"images": [save_image(tmp_path / "a.png", 30, 20)]}
    with ChatServer(Reply("yes")) as server:
        score(server, row(FRAMED, multi_modal_data=media), shows_media=False)

    assert isinstance(server.requests[0]["messages"][1]["content"], str)


def test_the_option_has_the_pool_of_a_run_call_it(tmp_path):
    with ChatServer(Reply("yes")) as server:
        kwargs = {"base_url": server.url, "model": "m", "cache_dir": str(tmp_path)}
        reward = RewardConfig(reward_function="mine.py:f", reward_function_kwargs=kwargs)
        worker = WorkerConfig(reward=reward)
        chosen = WorkerConfig(reward=reward, rollout=type(worker.rollout)(open_ended_reward=True)).scoring
        with RewardManager(chosen) as manager:
            job = manager.start()
            job.submit([0, 1], [row(FRAMED), row("Ada L.")])
            values = job.result()

    assert worker.scoring is reward
    assert values["overall"] == pytest.approx([1.0, 0.9])


def test_a_model_of_the_run_is_asked_if_there_is_one():
    with ChatServer(Reply("yes")) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        (scores,) = load_reward_function(OPEN_ENDED, servers=servers).score([row(FRAMED)])

    assert scores["accuracy"] == 1.0
    assert (server.requests[0]["model"], server.requests[0]["max_tokens"]) == ("judge", 512)


def test_openai_is_asked_by_default_with_the_key_of_its_variable(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    reward = load_reward_function(OPEN_ENDED)

    with pytest.raises(ValueError, match="environment variable OPENAI_API_KEY must hold the key"):
        reward.score([row(FRAMED)])
