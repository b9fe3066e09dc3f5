# SPDX-License-Identifier: Apache-2.0
"""The shipped judge in the pool of reward processes, against a small real server and against vLLM."""

import asyncio
import re
import sys

import pytest

from tests.architecture.source import ROOT
from tests.helpers.chat_server import ChatServer, Reply
from tests.helpers.vllm_server import vllm_server
from verl.config.reward_servers import RewardServerConfig
from verl.config.worker import RewardConfig
from verl.models.tiny import save_tiny_model
from verl.rewards.function import load_reward_function
from verl.rewards.graders.llm_judge import Judge
from verl.rewards.manager import RewardManager
from verl.rewards.servers import specs_of

FILE = f"{ROOT / 'examples' / 'reward_function' / 'llm_judge.py'}:compute_score"
PLACEHOLDER = {"base_url": "http://localhost:1/v1", "model": "m"}


def rows(responses):
    return [{"prompt": "Who?", "response": text, "ground_truth": "Ada Lovelace"} for text in responses]


def scores_of(kwargs, responses, **options):
    with RewardManager(
        RewardConfig(reward_function=FILE, reward_function_kwargs=kwargs, **options)
    ) as manager:
        job = manager.start()
        job.submit(range(len(responses)), rows(responses))
        return job.result()


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("It agrees.\nScore: 10", 1.0),
        ("score : 7/10", 0.7),
        ("**Score:** 8", 0.8),
        ("Final **Score**: `3`.", 0.3),
        ("Score: 2, no:\nScore: 4.", 0.4),  # the last one counts
        ("<think>Score: 9?</think> Score: 0", 0.0),
        ("Score: 11", None),
        ("Score: 7.5", None),
        ("Score: -3", None),
        ("Score (0-10)", None),
        ("Score: high", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_score_is_the_last_whole_number_from_0_to_10_after_the_word(answer, score):
    reward = load_reward_function(FILE, PLACEHOLDER)

    assert sys.modules[reward.function.__module__].read_score(answer) == score


def test_the_judge_sees_prompt_reference_and_response_without_thoughts():
    with ChatServer() as server:
        reward = load_reward_function(FILE, {"base_url": server.url, "model": "m"})
        (scores,) = reward.score(rows(["<think>Ada or {Grace}?</think>\nIt was Ada."]))

        system, user = server.requests[0]["messages"]
    assert scores == {"overall": 0.7, "accuracy": 0.7, "verdict": 1.0}
    assert "`Score: N`" in system["content"]
    assert user["content"] == (
        "<question>\nWho?\n</question>\n<reference>\nAda Lovelace\n</reference>\n"
        "<answer>\nIt was Ada.\n</answer>"
    )


def test_an_answer_without_a_score_earns_nothing_and_is_counted():
    with ChatServer(Reply("Score: 5"), Reply("I cannot say.")) as server:
        kwargs = {"base_url": server.url, "model": "m"}
        scores = scores_of(kwargs, ["a", "b"], max_concurrency=1)

    assert scores == {"overall": [0.5, 0.0], "accuracy": [0.5, 0.0], "verdict": [1.0, 0.0]}


def test_the_pool_makes_as_many_concurrent_calls_as_the_option_says():
    with ChatServer(Reply("Score: 5", delay_s=0.1)) as server:
        kwargs = {"base_url": server.url, "model": "m"}
        responses = [str(number) for number in range(12)]
        assert scores_of(kwargs, responses, max_concurrency=3)["overall"] == [0.5] * 12

    assert server.most_running == 3


def test_equal_responses_are_judged_once_and_a_run_that_is_repeated_asks_nothing(tmp_path):
    responses = ["Ada", "Ada", "Grace"] * 4
    with ChatServer(Reply("Score: 5", delay_s=0.05)) as server:
        kwargs = {"base_url": server.url, "model": "m", "cache_dir": str(tmp_path)}
        first = scores_of(kwargs, responses)
    again = scores_of(kwargs, responses, num_cpus=2)  # the server is gone

    assert first == again
    assert first["overall"] == [0.5] * 12
    assert len(server.requests) == 2


def test_a_refusal_ends_the_job_with_url_status_remedy_and_row():
    with ChatServer(Reply("no such model", 404)) as server:
        kwargs = {"base_url": server.url, "model": "nope"}
        with pytest.raises(ValueError, match="row 0") as raised:
            scores_of(kwargs, ["Ada"])

    expected = [f"judge 'nope' at {server.url} answered status 404: no such model", "llm_judge.py:", "Ada"]
    assert [part for part in expected if part not in str(raised.value)] == []


def test_a_judge_without_address_is_an_error_that_names_both_ways_to_give_one():
    with pytest.raises(
        ValueError, match=r"set `reward_servers\.judge\.model_path`, or `base_url` and `model`"
    ):
        scores_of({}, ["Ada"])


def test_the_judge_may_be_a_model_of_the_run():
    with ChatServer(Reply("Score: 5")) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        (scores,) = load_reward_function(FILE, servers=servers).score(rows(["Ada"]))

    assert scores["overall"] == 0.5


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A real vLLM server with a tiny model of random weights, called `tiny`."""
    folder = tmp_path_factory.mktemp("judge")
    model = save_tiny_model(folder / "model")
    with vllm_server(model, folder / "log.txt", "--served-model-name", "tiny") as url:
        yield url


@pytest.mark.slow
def test_vllm_judges_responses_in_the_pool_and_a_repeated_run_has_the_same_scores(address, tmp_path):
    kwargs = {"base_url": address, "model": "tiny", "cache_dir": str(tmp_path), "max_tokens": 8}
    responses = [f"It was number {number}." for number in range(24)]

    first = scores_of(kwargs, responses, num_cpus=2, max_concurrency=8)
    again = scores_of(kwargs, responses)

    assert first == again
    assert len(list(tmp_path.glob("??/*"))) == 24
    assert first["verdict"] == [0.0] * 24  # random weights grade nothing


@pytest.mark.slow
def test_vllm_takes_the_requests_other_fields(address):
    choices = ["Score: 3", "Score: 9"]
    judge = Judge(address, "tiny", max_tokens=8, options={"structured_outputs": {"choice": choices}})

    answer = asyncio.run(judge.ask([{"role": "user", "content": "Which?"}]))

    assert answer in choices


@pytest.mark.slow
def test_vllms_refusals_say_what_to_change(address):
    question = [{"role": "user", "content": "Which?"}]
    long = [{"role": "user", "content": "word " * 4000}]
    expected = {
        "The model `nope` does not exist.*`model` must be listed at .*/v1/models": (
            address,
            "nope",
            question,
        ),
        "status 404: .*`base_url` usually ends in /v1": (address.removesuffix("/v1"), "tiny", question),
        "status 400: .*maximum context length": (address, "tiny", long),
    }

    for message, (url, model, messages) in expected.items():
        with pytest.raises(ValueError) as raised:
            asyncio.run(Judge(url, model).ask(messages))
        assert re.search(message, str(raised.value))
