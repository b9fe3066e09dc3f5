# SPDX-License-Identifier: Apache-2.0
"""Sections `reward_servers.NAME`: how they are written, and what is wrong before anything starts."""

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.config.text import config_yaml, example_yaml, help_text, options_page
from verl.planning.step_plan import make_plan

JUDGE = "reward_servers.judge"
OWN = [f"{JUDGE}.model_path=owner/judge", f"{JUDGE}.colocate=false"]


@pytest.fixture
def minimal(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def main(rows, servers): ...")
    return [
        "data.train_files=owner/rows", "data.val_files=owner/rows",
        "worker.actor.model.model_path=owner/model", "worker.rollout.tensor_parallel_size=1",
        "trainer.n_gpus_per_node=2", "worker.rollout.n=2",
        f"worker.reward.reward_function={reward}", f"trainer.save_checkpoint_path={tmp_path}/run",
    ]  # fmt: skip


def load(minimal, *arguments):
    return load_config(PPOConfig, [*minimal, *arguments])


def problems_of(minimal, *arguments):
    with pytest.raises(ConfigError) as raised:
        load(minimal, *arguments)
    return raised.value.problems


def test_a_section_has_the_name_that_the_user_gives_it_in_a_file_and_in_arguments(minimal, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("reward_servers: {judge: {model_path: owner/judge, sampling: {seed: 1}}}")

    config = load(
        [f"config={file}", *minimal],
        f"{JUDGE}.sampling.max_tokens=3", "reward_servers.rm.kind=classify",
        "reward_servers.rm.model_path=12",
    )  # fmt: skip

    assert config.reward_servers["judge"].model_path == "owner/judge"
    assert config.reward_servers["judge"].sampling == {"seed": 1, "max_tokens": 3}
    assert config.reward_servers["rm"].model_path == "12"  # text, as in a section of fixed name
    file.write_text(config_yaml(config))
    assert load_config(PPOConfig, [f"config={file}"]) == config


def test_the_options_of_a_section_are_in_the_documentation_and_not_in_the_example():
    assert "## `reward_servers.NAME`" in options_page(PPOConfig)
    assert "reward_servers.NAME.gpu_memory_utilization=0.6" in help_text(PPOConfig, "reward_servers")
    assert "reward_servers: {}" in example_yaml(PPOConfig)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["kind=chatt"],
            "`reward_servers.judge.kind` must be one of ['chat', 'score', 'classify', 'embed', ",
        ),
        (["modelpath=a/b"], "did you mean `reward_servers.judge.model_path`?"),
        (["kind=chat"], "needs `reward_servers.judge.model_path` or `reward_servers.judge.url`, got neither"),
        (["model_path=a/b", "url=http://h/v1"], "got both: set one of them"),
        (["url=host:8000"], "`reward_servers.judge.url` must be like http://host:8000/v1, got 'host:8000'"),
        (
            ["url=http://h/v1", "n_gpus=2"],
            "`reward_servers.judge.n_gpus` has no effect on a server that runs",
        ),
        (["model_path=a/b", "api_key_env=KEY"], "`reward_servers.judge.api_key_env` belongs to"),
        (["model_path=./nowhere"], "`reward_servers.judge.model_path`: no folder"),
        (["model_path={empty}"], "is no model: it has no config.json and is empty"),
        (
            ["model_path=a/b", "kind=embed", "sampling.top_p=1"],
            "`reward_servers.judge.sampling` must be empty",
        ),
        (
            ["model_path=a/b", "colocate=false", "n_gpus=4", "tensor_parallel_size=3"],
            "`reward_servers.judge.n_gpus` (4) must be divisible by `reward_servers.judge.tensor_parallel",
        ),
        (["model_path=a/b", "n_gpus=4"], "must be at most the 2 GPUs that train"),
        (
            ["model_path=a/b", "engine_arguments={dtype: fp8}"],
            "are options: set `reward_servers.judge.dtype`",
        ),
    ],
)
def test_what_is_wrong_with_a_section_is_said_with_its_key(minimal, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    arguments = [
        f"{JUDGE}.{text.format(empty=tmp_path / 'empty') if '{empty}' in text else text}"
        for text in arguments
    ]

    assert message in problems_of(minimal, *arguments)[0]


def test_the_files_of_a_model_decide_how_many_gpus_may_share_it_and_how_long_texts_may_be(minimal, tmp_path):
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    (folder / "config.json").write_text('{"num_attention_heads": 4, "max_position_embeddings": 64}')
    options = ["colocate=false", "tensor_parallel_size=3", "max_model_len=65"]

    heads, length = problems_of(
        minimal, f"{JUDGE}.model_path={folder}", *(f"{JUDGE}.{each}" for each in options)
    )

    assert (
        "`reward_servers.judge.tensor_parallel_size` (3) must divide the model's 4 attention heads" in heads
    )
    assert "`reward_servers.judge.max_model_len` (65) must be at most 64" in length


@pytest.mark.parametrize(
    "option",
    ["algorithm.online_filtering=true", "trainer.rejection_sample=true", "algorithm.adv_estimator=remax"],
)
def test_a_server_that_sleeps_is_refused_where_scores_are_needed_while_the_engine_is_awake(minimal, option):
    (problem,) = problems_of(minimal, f"{JUDGE}.model_path=owner/judge", option)

    assert f"`{JUDGE}.colocate` must be false with `{option}`" in problem
    load(minimal, *OWN, option)


def test_a_server_that_sleeps_is_refused_where_sampling_and_training_run_at_the_same_time(minimal):
    options = ["trainer.async.mode=partial"]

    assert f"`{JUDGE}.colocate=false`" in problems_of(minimal, f"{JUDGE}.model_path=owner/judge", *options)[0]
    load(minimal, *OWN, *options)


def test_servers_without_a_reward_function_are_refused(minimal):
    problem = problems_of(minimal, *OWN, "worker.reward.reward_function=null")[-1]

    assert "only it asks ['judge']" in problem


def test_devices_of_servers_count_among_those_of_the_run(minimal):
    colocated = load(minimal, f"{JUDGE}.model_path=owner/judge")
    own = load(minimal, *OWN, f"{JUDGE}.n_gpus=4", f"{JUDGE}.tensor_parallel_size=2")
    remote = load(minimal, f"{JUDGE}.url=http://host/v1")

    assert [config.num_devices for config in (colocated, own, remote)] == [2, 6, 2]
    (line,) = [line.split() for line in make_plan(own).text.splitlines() if "reward server judge" in line]
    assert line[3] == "4"
    assert " ".join(line[4:]) == ("chat, on devices of its own: 2 replicas, tensor parallel 2, owner/judge")


def test_servers_on_cpu_need_cores_of_their_own(minimal, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    problem = problems_of(minimal, *OWN, "trainer.device=cpu", "data.rollout_batch_size=7")[0]

    assert "`trainer.n_gpus_per_node` (2) and `reward_servers.NAME.n_gpus` (1)" in problem
    assert "lower them to 2 in total" in problem
