# SPDX-License-Identifier: Apache-2.0
"""Configs of calls: the same layers and errors as on the command line, before anything heavy is imported."""

from pathlib import Path

import pytest

import verl
from tests.helpers.light_process import modules_of, run_light
from verl.api import EVALUATION_OPTIONS, read_config
from verl.config.ppo import PPOConfig
from verl.config.python_values import arguments_of
from verl.config.schema import ConfigError, load_config
from verl.config.sft import SFTConfig

RUN = {
    "data": {"train_files": "rows.jsonl", "val_files": ["a.jsonl", "b.jsonl"], "image_dir": None},
    "worker": {
        "actor": {"model": {"model_path": "001"}, "optim": {"lr": 1e-6}},
        "rollout": {"n": 4, "val_override_config": {"temperature": 0.0, "n": 1}},
        "reward": {"reward_function": "reward.py:f"},
    },
    "trainer": {"logger": ["file"], "experiment_name": "${not} a reference", "load_checkpoint_path": None},
}


def config_from_python(cls, source, overrides=()):
    return load_config(cls, arguments_of(cls, source, overrides))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "a.jsonl", "b.jsonl", "reward.py"):
        Path(name).write_text("def f(reward_inputs):\n    return []\n" if name == "reward.py" else "")


def test_sections_files_and_dotted_keys_describe_the_same_run():
    Path("run.yaml").write_text("worker: {rollout: {n: 2}}\ntrainer: {max_steps: 5}\n")
    expected = load_config(
        PPOConfig,
        [
            "config=run.yaml", "data.train_files=rows.jsonl", 'data.val_files=["a.jsonl","b.jsonl"]',
            'worker.actor.model.model_path="001"', "worker.actor.optim.lr=1e-6", "worker.rollout.n=4",
            "worker.rollout.val_override_config={temperature: 0.0, n: 1}",
            "worker.reward.reward_function=reward.py:f", "trainer.logger=[file]",
            r'trainer.experiment_name="\\${not} a reference"',
        ],
    )  # fmt: skip

    nested = config_from_python(PPOConfig, "run.yaml", [RUN])
    dotted = config_from_python(
        PPOConfig, Path("run.yaml"), [{"worker.rollout.n": 7, "data": RUN["data"]}, RUN]
    )
    whole = config_from_python(PPOConfig, RUN, [{"trainer.max_steps": 5}])

    assert nested == dotted == whole == expected
    assert nested.worker.actor.model.model_path == "001"
    assert nested.trainer.experiment_name == "${not} a reference"


def test_an_evaluation_of_a_run_with_own_processes_for_sampling_samples_where_that_run_trains():
    apart = {
        "worker.hybrid_engine": False,
        "trainer.n_gpus_for_rollout": 2,
        "trainer.async.mode": "one_step_off",
    }
    run = config_from_python(
        PPOConfig, RUN, [apart | {"trainer.device": "cuda", "trainer.n_gpus_per_node": 4}]
    )

    evaluation = config_from_python(PPOConfig, run, [EVALUATION_OPTIONS])

    assert (run.num_engines, run.world_size) == (1, 4)  # of two devices each
    assert evaluation.worker.hybrid_engine and (evaluation.num_engines, evaluation.world_size) == (2, 4)


def test_a_config_object_keeps_all_of_its_options_but_those_that_are_replaced():
    config = config_from_python(PPOConfig, RUN)

    same = config_from_python(PPOConfig, config)
    other = config_from_python(PPOConfig, config, [{"trainer.max_steps": 3}, {"trainer": {"max_steps": 4}}])

    assert same == config
    assert other.trainer.max_steps == 4
    assert other.worker == config.worker


def test_an_empty_mapping_clears_one_of_the_file():
    Path("run.yaml").write_text("worker: {rollout: {val_override_config: {n: 3}}}\n")

    kept = config_from_python(
        PPOConfig, "run.yaml", [RUN | {"worker": {**RUN["worker"], "rollout": {"n": 2}}}]
    )
    cleared = config_from_python(PPOConfig, "run.yaml", [RUN, {"worker.rollout.val_override_config": {}}])

    assert kept.worker.rollout.val_override_config == {"n": 3}
    assert cleared.worker.rollout.val_override_config == {}


def test_every_problem_is_in_one_error_with_the_words_of_the_command():
    overrides = {"trainer.max_stepz": 2, "worker": {"rollout": {"n": "many"}}}

    with pytest.raises(verl.ConfigError) as by_call:
        verl.train(RUN, overrides)
    with pytest.raises(ConfigError) as by_command:
        load_config(
            PPOConfig,
            [
                "data.train_files=rows.jsonl", "data.val_files=a.jsonl", "worker.actor.model.model_path=001",
                "worker.reward.reward_function=reward.py:f", "trainer.max_stepz=2", "worker.rollout.n=many",
            ],
        )  # fmt: skip

    assert by_call.value.problems == by_command.value.problems
    assert "did you mean `trainer.max_steps`?" in str(by_call.value)


@pytest.mark.parametrize("source", [3, None, ["run.yaml"]])
def test_what_is_no_config_is_refused_by_name(source):
    with pytest.raises(ConfigError, match="a config must be a path, a mapping or a PPOConfig, got "):
        verl.train(source)


def test_a_value_that_no_yaml_file_could_hold_is_refused():
    with pytest.raises(
        ConfigError, match=r"`trainer\.max_steps` must be a number, text, list or mapping, got object"
    ):
        config_from_python(PPOConfig, RUN, [{"trainer.max_steps": object()}])


def test_the_options_of_fine_tuning_are_recognized_and_the_remedy_is_said():
    sft = {"data": {"train_files": "rows.jsonl", "max_length": 8}, "worker.actor.model.model_path": "m"}
    sft["trainer"] = {"val_before_train": False}

    with pytest.raises(ConfigError, match="the options of fine-tuning: pass `kind='sft'`"):
        read_config(sft, {}, {})
    config = read_config(sft, {}, {}, "sft")
    with pytest.raises(ConfigError, match="the options of reinforcement learning: pass `kind='rl'`"):
        read_config(RUN, {}, {}, "sft")
    with pytest.raises(ValueError, match="`kind` must be 'rl' or 'sft', got 'dpo'"):
        read_config(RUN, {}, {}, "dpo")

    assert isinstance(config, SFTConfig)
    assert read_config(config, {}, {}) == config  # its type says the kind


def test_restarts_are_refused_because_they_would_run_the_callers_script_again():
    with pytest.raises(ConfigError, match=r"`trainer\.max_restarts` must be 0 .*, got 2: .*verl-train"):
        verl.train(RUN, {"trainer.max_restarts": 2})
    with (
        pytest.raises(ConfigError, match=r"`trainer\.max_restarts` must be 0"),
        verl.build(RUN, trainer={"max_restarts": 1}),
    ):
        pass


def test_options_without_effect_are_warnings_at_the_line_of_the_call():
    with pytest.warns(UserWarning, match="`worker.rollout.bs_vllm` has no effect") as caught:
        read_config(RUN, {"worker.rollout.bs_vllm": 3}, {})

    assert len(caught) == 1


def test_importing_the_package_is_light_and_its_names_are_there():
    assert "omegaconf" not in modules_of(run_light("import verl", most_modules=150))
    run_light("import verl; verl.train, verl.build, verl.PPOConfig, verl.ConfigError")
    assert set(verl.__all__) <= set(dir(verl))
    with pytest.raises(AttributeError, match="module 'verl' has no attribute 'tran'"):
        _ = verl.tran
