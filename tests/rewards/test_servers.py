# SPDX-License-Identifier: Apache-2.0
"""Models of `reward_servers` in the reward function: by URL, and by the addresses that a run publishes."""

import asyncio
import threading

import pytest

from tests.helpers.chat_server import ChatServer, Reply
from tests.helpers.nightly import by_day
from verl.config.reward_servers import RewardServerConfig
from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import RewardManager
from verl.rewards.servers import AddressFile, ServerSpec, connect, specs_of

ASKS = """
    REWARD_TYPE = "sequential"
    async def main(row, servers):
        answer = await servers["judge"].ask([{"role": "user", "content": row["response"]}])
        return {"overall": float(answer)}
"""
HELLO = [{"role": "user", "content": "Is 7 prime?"}]


def by_url(server, **options):
    return specs_of({"judge": RewardServerConfig(url=server.url, **options)})


def served(tmp_path, *urls, lost=None, **options):
    """A model that the run serves at these addresses."""
    config = RewardServerConfig(model_path="owner/judge", **options)
    addresses = AddressFile(tmp_path / "judge.json", "the key", "owner/judge", config.start_timeout_s)
    addresses.publish(urls, lost)
    return {"judge": ServerSpec("judge", config, addresses)}


def ask(specs, **parameters):
    return asyncio.run(connect(specs)["judge"].ask(HELLO, **parameters))


def score(specs, path, *responses, **options):
    with RewardManager(RewardConfig(reward_function=path, **options), None, specs) as manager:
        job = manager.start()
        job.submit(range(len(responses)), [{"response": text, "ground_truth": ""} for text in responses])
        return job.result()


def test_a_model_by_url_and_a_served_one_get_the_same_request(tmp_path):
    with ChatServer(Reply("7")) as server:
        sampling = {"seed": 1, "max_tokens": 9}
        ask(by_url(server, served_model="judge", sampling=sampling), top_p=0.5)
        ask(served(tmp_path, server.url, sampling=sampling), top_p=0.5)

        first, second = server.requests
        keys = [headers["Authorization"] for headers in server.headers]
    assert first == second
    assert first == {
        "model": "judge", "messages": HELLO, "temperature": 0.0, "max_tokens": 9, "seed": 1, "top_p": 0.5
    }  # fmt: skip
    assert keys == ["Bearer none", "Bearer the key"]


@pytest.mark.parametrize("has_url", by_day([True, False], True))
def test_the_pool_hands_the_models_to_the_function(reward_file, tmp_path, has_url):
    with ChatServer(Reply("0.5")) as server:
        specs = by_url(server) if has_url else served(tmp_path, server.url)

        assert score(specs, reward_file(ASKS), "a", "b") == {"overall": [0.5, 0.5]}


def test_replicas_take_turns(tmp_path):
    with ChatServer() as first, ChatServer() as second:
        judge = connect(served(tmp_path, first.url, second.url))["judge"]
        for _ in range(4):
            asyncio.run(judge.ask(HELLO))

        assert (len(first.requests), len(second.requests)) == (2, 2)


def test_a_request_whose_replica_is_gone_or_fails_goes_to_another(tmp_path):
    with ChatServer() as gone:
        pass
    with ChatServer(Reply("engine died", 500)) as failing, ChatServer(Reply("7")) as living:
        judge = connect(served(tmp_path, gone.url, failing.url, living.url))["judge"]

        assert [asyncio.run(judge.ask(HELLO)) for _ in range(2)] == ["7", "7"]


def test_a_request_waits_for_a_replica_that_starts_again(tmp_path):
    specs = served(tmp_path)
    with ChatServer(Reply("7")) as server:
        threading.Timer(1.0, specs["judge"].addresses.publish, [[server.url]]).start()

        assert ask(specs) == "7"


def test_a_request_waits_no_longer_than_a_start_may_take(tmp_path):
    with pytest.raises(
        ConnectionError, match=r"judge 'judge' at reward_servers.judge has no replica after 0.2"
    ):
        ask(served(tmp_path, start_timeout_s=0.2))


def test_a_failing_replica_is_asked_a_bounded_number_of_times(tmp_path):
    with ChatServer(Reply("no", 503)) as server:
        with pytest.raises(RuntimeError, match="status 503 in up to 2 attempts"):
            ask(served(tmp_path, server.url, max_retries=1))

        assert len(server.requests) == 2


def test_the_loss_of_a_server_is_what_on_failure_says(reward_file, tmp_path):
    specs = served(tmp_path, lost="all replicas are lost")
    path = reward_file(
        """
        REWARD_TYPE = "sequential"
        async def main(row, servers):
            if row["response"] == "known":
                return {"overall": 1.0}
            return {"overall": float(await servers["judge"].ask([]))}
        """
    )
    options = {"on_failure": "score", "failure_score": -1.0, "max_failure_ratio": 0.5}

    values = score(specs, path, "known", "asked", **options)

    assert values == {"overall": [1.0, -1.0], "failures": [0.0, 1.0], "retries": [0.0, 1.0]}
    with pytest.raises(ValueError, match="ConnectionError: all replicas are lost"):
        score(specs, path, "asked")


def test_cached_answers_of_a_served_model_are_found_wherever_it_is(tmp_path):
    options = {"cache_dir": str(tmp_path / "cache")}
    with ChatServer(Reply("7")) as first:
        ask(served(tmp_path, first.url, **options))
    with ChatServer(Reply("8")) as second:
        assert ask(served(tmp_path, second.url, **options)) == "7"
        assert second.requests == []


def test_scores_classes_and_vectors_come_from_their_endpoints():
    replies = [
        Reply(body='{"data": [{"score": 0.25}]}'),
        Reply(body='{"data": [{"probs": [0.1, 0.9]}]}'),
        Reply(body='{"data": [{"embedding": [1, 2]}]}'),
    ]
    with ChatServer(*replies) as server:
        models = connect(specs_of({
            kind: RewardServerConfig(url=server.url, kind=kind, served_model="m")
            for kind in ("score", "classify", "embed")
        }))  # fmt: skip

        async def ask_all():
            return (
                await models["score"].score("a", "b"),
                await models["classify"].classify("a"),
                await models["embed"].embed("a"),
            )

        assert asyncio.run(ask_all()) == (0.25, [0.1, 0.9], [1.0, 2.0])
        assert server.paths == ["/score", "/classify", "/v1/embeddings"]
        assert server.requests[0] == {"model": "m", "text_1": "a", "text_2": "b"}


def test_a_function_is_loaded_before_its_model_is_served(reward_file):
    specs = specs_of({"judge": RewardServerConfig(model_path="owner/judge")})

    reward = load_reward_function(reward_file(ASKS), servers=specs)

    assert not specs["judge"].is_ready
    with pytest.raises(ConnectionError, match=r"`reward_servers\.judge` is not served yet"):
        reward.score([{"response": "a"}])


def test_servers_that_the_function_does_not_take_are_an_error(reward_file):
    specs = specs_of({"judge": RewardServerConfig(url="http://host/v1")})

    with pytest.raises(
        ValueError, match=r"`reward_servers` has \['judge'\], which .* does not take: give it"
    ):
        load_reward_function(reward_file("def main(rows): ..."), servers=specs)


def test_a_function_that_needs_servers_says_so_without_the_section(reward_file):
    with pytest.raises(ValueError, match="`reward_servers` must name a model for the parameter `servers`"):
        load_reward_function(reward_file("def main(rows, servers): ..."))
