# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM serves on CPU for the reward function: answers, kinds, death and restart."""

import asyncio
import os
import signal

import pytest
import ray
from transformers import AutoConfig, AutoModelForSequenceClassification

from verl.config.reward_servers import RewardServerConfig
from verl.models.tiny import save_tiny_model
from verl.rewards.servers import connect, specs_of
from verl.single_controller.ray.cluster import connect as connect_to_ray
from verl.trainer.reward_servers.servers import RewardServers

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

HELLO = [{"role": "user", "content": "Which colour?"}]
KEY = "SERVED_KEY"
COMMON = {"dtype": "fp32", "max_model_len": 256, "colocate": False}


@pytest.fixture(scope="module")
def ray_session():
    connect_to_ray()
    yield
    ray.shutdown()


def serving(model, folder, **options):
    config = RewardServerConfig(model_path=str(model), **COMMON | options)
    return RewardServers({"judge": config}, "cpu", folder, num_devices=2)


def ask(specs):
    return asyncio.run(connect(specs)["judge"].ask(HELLO, max_tokens=8))


def test_a_server_that_is_killed_starts_again_and_answers_as_before(ray_session, tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    with serving(model, tmp_path) as servers:
        servers.start_own()
        servers.wait_until_started()
        answer = ask(servers.specs)
        spec = servers.specs["judge"]
        monkeypatch.setenv(KEY, spec.addresses.key)
        (url,) = spec.addresses.living()
        by_url = RewardServerConfig(url=url, served_model="judge", api_key_env=KEY)
        answer_by_url = ask(specs_of({"judge": by_url}))
        [replica] = servers.models["judge"].replicas
        pid = ray.get(replica._actor.__ray_call__.remote(lambda server: server._child.pid))
        os.kill(pid, signal.SIGKILL)

        again = ask(servers.specs)  # waits for the next server

        assert answer == answer_by_url == again
        assert servers.models["judge"].num_restarts == 1


def test_a_model_that_cannot_be_served_is_an_error_with_the_end_of_the_log(ray_session, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    with serving(model, tmp_path, engine_arguments={"no_such_argument": 1}) as servers:
        servers.start_own()
        with pytest.raises(
            RuntimeError, match=r"(?s)`reward_servers\.judge` did not start.*no-such-argument"
        ):
            servers.wait_until_started()


@pytest.mark.parametrize("kind", ["score", "classify", "embed"])
def test_other_kinds_of_models_are_served(ray_session, tmp_path, kind):
    model = save_tiny_model(tmp_path / "model", "qwen3")
    if kind != "embed":  # a reward model
        config = AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    with serving(model, tmp_path, kind=kind) as servers:
        servers.start_own()
        servers.wait_until_started()
        served = connect(servers.specs)["judge"]
        values = {
            "score": lambda: served.score("red", "green"),
            "classify": lambda: served.classify("red", use_activation=False),
            "embed": lambda: served.embed("red"),
        }[kind]
        found = asyncio.run(values())

    number = {"score": float, "classify": len, "embed": len}[kind](found)
    assert number == {"score": found, "classify": 1, "embed": 128}[kind]
