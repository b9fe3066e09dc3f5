# SPDX-License-Identifier: Apache-2.0
"""How vLLM's server is started for a model of `reward_servers`, and who may use it."""

import asyncio

import pytest

from verl.config.reward_servers import RewardServerConfig
from verl.workers.rollout.model_server import (
    KEY_VARIABLE,
    KeyRequired,
    ServerLaunch,
    server_arguments,
    server_environment,
)


def launch(device="cuda", **options):
    return ServerLaunch("judge", RewardServerConfig(model_path="/m", **options), device, "the key", "log")


def options_of(launched):
    """The options with a value, and the switches, of a server's command line."""
    arguments = server_arguments(launched, "127.0.0.1", 8000)
    pairs = dict(zip(arguments, [*arguments[1:], "--"], strict=True))
    names = [name for name in arguments if name.startswith("--")]
    return (
        {name[2:]: pairs[name] for name in names if not pairs[name].startswith("--")},
        {name[2:] for name in names if pairs[name].startswith("--")},
    )


def test_a_server_has_the_name_the_limits_and_the_guard_of_its_section():
    options, switches = options_of(launch(max_model_len=64, tensor_parallel_size=2, dtype="fp16"))

    assert options["model"] == "/m" and options["served-model-name"] == "judge"
    assert (options["max-model-len"], options["tensor-parallel-size"]) == ("64", "2")
    assert options["dtype"] == "float16"
    assert options["middleware"] == "verl.workers.rollout.model_server.KeyRequired"
    assert "max-num-seqs" not in options and "trust-remote-code" not in switches


@pytest.mark.parametrize(
    ("kind", "runner"),
    [("chat", "generate"), ("score", "pooling"), ("classify", "pooling"), ("embed", "pooling")],
)
def test_the_kind_chooses_the_runner(kind, runner):
    assert options_of(launch(kind=kind))[0]["runner"] == runner


def test_only_a_server_that_shares_gpus_can_sleep():
    assert "enable-sleep-mode" in options_of(launch())[1]
    assert "enable-sleep-mode" not in options_of(launch(colocate=False))[1]
    assert "VLLM_SERVER_DEV_MODE" in server_environment(launch())
    assert "VLLM_SERVER_DEV_MODE" not in server_environment(launch(colocate=False))


def test_a_server_on_cpu_compiles_nothing_and_bounds_its_cache():
    options, switches = options_of(launch("cpu"))

    assert options["kv-cache-memory-bytes"] == str(1 << 28)
    assert "enforce-eager" in switches and "gpu-memory-utilization" not in options


def test_further_arguments_reach_the_server_as_text_switches_and_json():
    more = {
        "limit_mm_per_prompt": {"image": 4},
        "enable_prefix_caching": True,
        "seed": 3,
        "async_scheduling": False,
    }
    options, switches = options_of(launch(engine_arguments=more))

    assert options["limit-mm-per-prompt"] == '{"image": 4}' and options["seed"] == "3"
    assert {"enable-prefix-caching", "no-async-scheduling"} <= switches


def test_the_key_is_in_no_argument_and_not_shown():
    started = launch()

    assert "the key" not in " ".join(server_arguments(started, "127.0.0.1", 8000))
    assert "the key" not in repr(started)
    assert server_environment(started)[KEY_VARIABLE] == "the key"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sleep", "/score", "/health"])
@pytest.mark.parametrize(("given", "status"), [(b"Bearer the key", 200), (b"Bearer none", 401), (None, 401)])
def test_every_path_needs_the_key(monkeypatch, path, given, status):
    monkeypatch.setenv(KEY_VARIABLE, "the key")
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    headers = [] if given is None else [(b"authorization", given)]
    asyncio.run(KeyRequired(app)({"type": "http", "path": path, "headers": headers}, None, send))

    assert sent[0]["status"] == status
